// Calls that read or write files. A file system may answer late or never: such calls must not take every thread.
#ifndef SUPEROFFLOAD_SERVER_RPC_FILE_OPERATIONS_H_
#define SUPEROFFLOAD_SERVER_RPC_FILE_OPERATIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace superoffload::rpc {

// Thread-safe.
class FileOperations {
 public:
  // One that is under way, until it is destroyed. Must not outlive the FileOperations.
  class Operation {
   public:
    Operation(FileOperations* all, uid_t uid) : all_(all), uid_(uid) {}
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

   private:
    FileOperations* const all_;
    const uid_t uid_;
  };

  // RESOURCE_EXHAUSTED: too many of the user, or of all, are under way.
  absl::StatusOr<std::unique_ptr<Operation>> Begin(uid_t uid);

 private:
  static constexpr size_t kPerUser = 8;
  static constexpr size_t kTotal = 32;

  absl::Mutex mu_;
  size_t total_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uid_t, size_t> by_user_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_FILE_OPERATIONS_H_
