// A schedule's directory is its own, also among daemons, and among machines where the file system has locks: two
// optimizers that share one would each keep half of their checkpoints and remove the other's. The ranks of a run have
// one together, each with a file of its own.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_DIRECTORY_CLAIM_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_DIRECTORY_CLAIM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/memory/shared_memory.h"

namespace superoffload::checkpoint {

// The file in it that is locked; it says by whom.
inline constexpr char kClaimFile[] = ".superoffload-schedule";

class DirectoryClaim {
 public:
  // With the rights of the calling thread. FAILED_PRECONDITION: somebody else has it. Where nothing can be locked
  // (there is no such directory, no right to write, no locks) nothing is known of others, and the claim is as good as
  // another. `rank`: of a run of several; none: the optimizer trains alone.
  static absl::StatusOr<std::shared_ptr<DirectoryClaim>> Take(const std::string& directory,
                                                              const std::string& optimizer,
                                                              std::optional<uint32_t> rank);

 private:
  DirectoryClaim(memory::FileDescriptor file, memory::FileDescriptor shared)
      : file_(std::move(file)), shared_(std::move(shared)) {}

  const memory::FileDescriptor file_;
  const memory::FileDescriptor shared_;  // with the other ranks
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_DIRECTORY_CLAIM_H_
