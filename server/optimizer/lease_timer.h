// Tells when something has been left alone for longer than its lease.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_LEASE_TIMER_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_LEASE_TIMER_H_

#include <functional>
#include <map>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/optimizer/optimizer_observer.h"

namespace superoffload::optimizer {

// Thread-safe. Leases run on a clock that nobody sets.
class LeaseTimer {
 public:
  // `on_expiry` is called by the timer's thread, once per lease that ran out; it may call Start and Stop.
  explicit LeaseTimer(std::function<void(const OptimizerId&)> on_expiry);
  ~LeaseTimer();

  // Replaces the lease of `id`; an infinite one never runs out.
  void Start(const OptimizerId& id, absl::Duration lease);
  void Stop(const OptimizerId& id);

 private:
  void Run();
  absl::Duration UntilNextDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::function<void(const OptimizerId&)> on_expiry_;
  absl::Mutex mu_;
  std::map<OptimizerId, absl::Duration> deadlines_ ABSL_GUARDED_BY(mu_);  // on the steady clock
  bool changed_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_LEASE_TIMER_H_
