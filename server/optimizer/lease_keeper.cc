#include "server/optimizer/lease_keeper.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace superoffload::optimizer {

LeaseKeeper::LeaseKeeper(std::function<void(const OptimizerId&)> on_expiry)
    : on_expiry_(std::move(on_expiry)), thread_([this] { Run(); }) {}

LeaseKeeper::~LeaseKeeper() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = changed_ = true;
  }
  thread_.join();
}

void LeaseKeeper::Start(const OptimizerId& id, absl::Duration lease) {
  absl::MutexLock lock(&mu_);
  deadlines_[id] = absl::Now() + lease;
  changed_ = true;
}

void LeaseKeeper::Stop(const OptimizerId& id) {
  absl::MutexLock lock(&mu_);
  deadlines_.erase(id);
}

absl::Time LeaseKeeper::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [id, deadline] : deadlines_) next = std::min(next, deadline);
  return next;
}

void LeaseKeeper::Run() {
  mu_.Lock();
  while (!stopping_) {
    mu_.AwaitWithDeadline(absl::Condition(&changed_), NextDeadline());
    changed_ = false;
    std::vector<OptimizerId> expired;
    for (const auto& [id, deadline] : deadlines_) {
      if (deadline <= absl::Now()) expired.push_back(id);
    }
    for (const OptimizerId& id : expired) deadlines_.erase(id);
    mu_.Unlock();
    for (const OptimizerId& id : expired) on_expiry_(id);
    mu_.Lock();
  }
  mu_.Unlock();
}

}  // namespace superoffload::optimizer
