// What the connections of one user may ask of a gRPC server. gRPC keeps memory for each call from its first header on,
// also for one that is cancelled at once, and frames that belong to no call cost it time: both before anybody is asked
// who calls. No client of ours comes near these numbers; who exceeds them is served more slowly, or not at all.
#ifndef SUPEROFFLOAD_SERVER_HOST_CALL_ALLOWANCE_H_
#define SUPEROFFLOAD_SERVER_HOST_CALL_ALLOWANCE_H_

#include <algorithm>
#include <cstddef>

#include "absl/time/time.h"

namespace superoffload::host {

// So many at once, and so many per second from then on.
class TokenBucket {
 public:
  TokenBucket(double most, double per_second) : most_(most), per_second_(per_second), left_(most) {}

  bool Take(absl::Time now) {
    Fill(now);
    if (left_ < 1) return false;
    left_ -= 1;
    return true;
  }

  bool IsFull(absl::Time now) {
    Fill(now);
    return left_ >= most_;
  }

 private:
  void Fill(absl::Time now) {
    if (now <= filled_) return;
    left_ = std::min(most_, left_ + per_second_ * absl::ToDoubleSeconds(now - filled_));
    filled_ = now;
  }

  const double most_;
  const double per_second_;
  double left_;
  absl::Time filled_ = absl::InfinitePast();
};

struct CallLimits {
  double calls = 1000;  // at once, and per second
  // Frames that are not a call's messages: settings, pings, windows, data of a few bytes.
  double frames = 4000;
  size_t open_calls = 2048;        // of all connections of a user
  size_t header_bytes = 32 << 10;  // of one call
};

// Of one user.
struct CallAllowance {
  explicit CallAllowance(const CallLimits& limits)
      : calls(limits.calls, limits.calls), frames(limits.frames, limits.frames) {}

  TokenBucket calls;
  TokenBucket frames;
  size_t open_calls = 0;
  size_t connections = 0;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_CALL_ALLOWANCE_H_
