// The clock of a simulation, and what is to happen when. Nothing here looks at a wall clock: a run gives the same
// events in the same order every time.
//
// Not thread-safe: a simulation has one thread.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_VIRTUAL_TIME_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_VIRTUAL_TIME_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

namespace superoffload::simulator {

class VirtualTime {
 public:
  // Names an event that has not happened yet.
  using Event = std::pair<double, uint64_t>;  // when; which of those at that time, in order of insertion

  // Seconds since the simulation began.
  double now() const { return now_; }

  // `run` is called `delay` seconds from now, after everything that was asked for earlier at the same time.
  // `delay` is finite and not negative.
  Event After(double delay, std::function<void()> run);

  // The event must not have happened, nor have been cancelled.
  void Cancel(const Event& event);

  // The next event happens; false when there is none.
  bool Step();

  // Until nothing is left.
  void Run();

  size_t pending() const { return events_.size(); }

 private:
  double now_ = 0;
  uint64_t sequence_ = 0;
  std::map<Event, std::function<void()>> events_;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_VIRTUAL_TIME_H_
