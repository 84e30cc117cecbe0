#include "server/simulator/virtual_time.h"

#include <cmath>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::simulator {

VirtualTime::Event VirtualTime::After(double delay, std::function<void()> run) {
  SUPEROFFLOAD_CHECK(std::isfinite(delay) && delay >= 0);
  const Event event(now_ + delay, sequence_++);
  events_.emplace_hint(events_.end(), event, std::move(run));
  return event;
}

void VirtualTime::Cancel(const Event& event) { SUPEROFFLOAD_CHECK(events_.erase(event) == 1); }

bool VirtualTime::Step() {
  if (events_.empty()) return false;
  auto next = events_.extract(events_.begin());
  now_ = next.key().first;
  next.mapped()();
  return true;
}

void VirtualTime::Run() {
  while (Step()) {
  }
}

}  // namespace superoffload::simulator
