// How many control calls a user may make: one that calls in a loop must not starve the others.
#ifndef SUPEROFFLOAD_SERVER_RPC_CALL_QUOTA_H_
#define SUPEROFFLOAD_SERVER_RPC_CALL_QUOTA_H_

#include <sys/types.h>

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace superoffload::rpc {

// Thread-safe. An allowance per user, which holds two seconds' worth of calls.
class CallQuota {
 public:
  // 0 means no limit.
  explicit CallQuota(uint32_t calls_per_second) : calls_per_second_(calls_per_second) {}

  void SetCallsPerSecond(uint32_t calls_per_second);

  // RESOURCE_EXHAUSTED: the user's calls are used up for now.
  absl::Status Take(uid_t uid, absl::Time now);

 private:
  struct Allowance {
    double calls;
    absl::Time filled;
  };

  absl::Mutex mu_;
  uint32_t calls_per_second_ ABSL_GUARDED_BY(mu_);
  std::map<uid_t, Allowance> allowances_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_CALL_QUOTA_H_
