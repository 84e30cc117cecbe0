#include "server/optimizer/lease_timer.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "kernels/base/check.h"

namespace superoffload::optimizer {
namespace {

// A mutex waits by the clock that may be set: look at the steady one at least so often.
constexpr absl::Duration kLongestWait = absl::Seconds(10);

absl::Duration Now() { return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch()); }

}  // namespace

LeaseTimer::LeaseTimer(std::function<void(const OptimizerId&)> on_expiry)
    : on_expiry_(std::move(on_expiry)), thread_([this] { Run(); }) {}

LeaseTimer::~LeaseTimer() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = changed_ = true;
  }
  thread_.join();
}

void LeaseTimer::Start(const OptimizerId& id, absl::Duration lease) {
  absl::MutexLock lock(&mu_);
  deadlines_[id] = Now() + lease;
  changed_ = true;
}

void LeaseTimer::Stop(const OptimizerId& id) {
  absl::MutexLock lock(&mu_);
  deadlines_.erase(id);
}

absl::Duration LeaseTimer::UntilNextDeadline() const {
  absl::Duration next = absl::InfiniteDuration();
  for (const auto& [id, deadline] : deadlines_) next = std::min(next, deadline);
  return next == absl::InfiniteDuration() ? next : std::min(next - Now(), kLongestWait);
}

void LeaseTimer::Run() {
  mu_.Lock();
  while (!stopping_) {
    mu_.AwaitWithTimeout(absl::Condition(&changed_), UntilNextDeadline());
    changed_ = false;
    std::vector<OptimizerId> expired;
    for (const auto& [id, deadline] : deadlines_) {
      if (deadline <= Now()) expired.push_back(id);
    }
    for (const OptimizerId& id : expired) {
      SUPEROFFLOAD_CHECK_EQ(deadlines_.erase(id), 1, "the lease of ", id.name);
    }
    mu_.Unlock();
    for (const OptimizerId& id : expired) on_expiry_(id);
    mu_.Lock();
  }
  mu_.Unlock();
}

}  // namespace superoffload::optimizer
