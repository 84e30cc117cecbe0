// The clock of an engine that runs in virtual time.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_VIRTUAL_CLOCK_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_VIRTUAL_CLOCK_H_

#include "absl/time/time.h"
#include "server/engine/platform.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

// Begins at the epoch.
class VirtualClock final : public engine::Clock {
 public:
  explicit VirtualClock(const VirtualTime* time) : time_(time) {}
  absl::Time Now() const override { return absl::UnixEpoch() + absl::Seconds(time_->now()); }

 private:
  const VirtualTime* const time_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_VIRTUAL_CLOCK_H_
