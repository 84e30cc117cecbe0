// Calls of which only so many may be under way: those that read or write files, since a file system may answer late or
// never and must not take every thread, and those whose answers take much memory.
#ifndef SUPEROFFLOAD_SERVER_RPC_BOUNDED_CALLS_H_
#define SUPEROFFLOAD_SERVER_RPC_BOUNDED_CALLS_H_

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace superoffload::rpc {

// Thread-safe.
class BoundedCalls {
 public:
  // `what` names them, in the plural.
  BoundedCalls(size_t per_user, size_t total, const char* what) : most_per_user_(per_user), most_(total), what_(what) {}

  // One that is under way, until it is destroyed. Must not outlive the BoundedCalls.
  class Place {
   public:
    Place(BoundedCalls* all, uid_t uid) : all_(all), uid_(uid) {}
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    BoundedCalls* const all_;
    const uid_t uid_;
  };

  // RESOURCE_EXHAUSTED: too many of the user, or of all, are under way.
  absl::StatusOr<std::unique_ptr<Place>> Begin(uid_t uid);

 private:
  const size_t most_per_user_;
  const size_t most_;
  const char* const what_;

  absl::Mutex mu_;
  size_t total_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uid_t, size_t> by_user_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_BOUNDED_CALLS_H_
