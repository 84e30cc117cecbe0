#include "server/rpc/call_quota.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace superoffload::rpc {

void CallQuota::SetCallsPerSecond(uint32_t calls_per_second) {
  absl::MutexLock lock(&mu_);
  calls_per_second_ = calls_per_second;
}

absl::Status CallQuota::Take(uid_t uid, absl::Time now) {
  absl::MutexLock lock(&mu_);
  if (calls_per_second_ == 0) return absl::OkStatus();
  const double most = 2.0 * calls_per_second_;
  Allowance& allowance = allowances_.try_emplace(uid, Allowance{most, now}).first->second;
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - allowance.filled));  // clocks jump
  allowance.calls = std::min(most, allowance.calls + seconds * calls_per_second_);
  allowance.filled = now;
  if (allowance.calls < 1) {
    return absl::ResourceExhaustedError(
        absl::StrCat("more than ", calls_per_second_, " control calls per second by uid ", uid,
                     "; call less often (steps need none), or ask the daemon's operator "
                     "to raise control_calls_per_second"));
  }
  allowance.calls -= 1;
  return absl::OkStatus();
}

}  // namespace superoffload::rpc
