// A process whose CPU work uses all of its cores at once, one task after the other, as the published optimizers do.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_CPU_QUEUE_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_CPU_QUEUE_H_

#include <deque>
#include <functional>
#include <string>

#include "server/simulator/shared_bandwidth.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

class CpuQueue {
 public:
  struct Task {
    std::string name;
    double bytes = 0;    // that it reads and writes, above zero
    double seconds = 0;  // that it takes when nobody else uses the memory, above zero
    double delay = 0;    // before it, in which the process does nothing
    std::function<void()> done;
  };

  // All must outlive this; `timeline` may be null.
  CpuQueue(VirtualTime* time, SharedBandwidth* host_memory, Timeline* timeline)
      : time_(time), host_memory_(host_memory), timeline_(timeline) {}

  CpuQueue(const CpuQueue&) = delete;
  CpuQueue& operator=(const CpuQueue&) = delete;

  // `task.done` is never called from inside of Run.
  void Run(Task task);

  double busy_seconds() const { return busy_seconds_; }  // of tasks that are done, delays included

 private:
  void Begin();
  void Finish();

  VirtualTime* const time_;
  SharedBandwidth* const host_memory_;
  Timeline* const timeline_;
  std::deque<Task> tasks_;  // the first is under way
  double begun_ = 0;
  double busy_seconds_ = 0;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_CPU_QUEUE_H_
