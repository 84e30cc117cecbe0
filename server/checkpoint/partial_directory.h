// A directory that appears under its name with everything in it, or not at all.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_PARTIAL_DIRECTORY_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_PARTIAL_DIRECTORY_H_

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/memory/shared_memory.h"

namespace superoffload::checkpoint {

// It grows in a hidden one beside it, ".NAME.partial", which is removed unless it is published. Nobody but its user
// reads what is in it until then; from then on it has the modes that the umask gives.
class PartialDirectory {
 public:
  // ALREADY_EXISTS, INVALID_ARGUMENT: `target`. FAILED_PRECONDITION: another one is being written there.
  static absl::StatusOr<std::unique_ptr<PartialDirectory>> Create(const std::filesystem::path& target);
  ~PartialDirectory();

  // Its files must be synced.
  absl::Status Publish();

  std::string operator/(const std::string& file) const { return path_ / file; }

 private:
  absl::Status LetOthersRead() const;

  PartialDirectory(std::filesystem::path target, std::filesystem::path path, memory::FileDescriptor lock,
                   std::optional<mode_t> mode)
      : target_(std::move(target)), path_(std::move(path)), lock_(std::move(lock)), mode_(mode) {}

  const std::filesystem::path target_, path_;
  const memory::FileDescriptor lock_;
  const std::optional<mode_t> mode_;  // that it gets; none on a file system that has none
  bool published_ = false;
};

// Removes what killed daemons have left of targets in `directory`, of those names that `is_ours` takes.
void RemoveLeftPartials(const std::filesystem::path& directory, const std::function<bool(absl::string_view)>& is_ours);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_PARTIAL_DIRECTORY_H_
