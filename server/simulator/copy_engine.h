// One direction of the link: copies one after the other, in the order in which they were submitted. A copy reads or
// writes the host's memory, so the CPU's passes slow it down and it slows them down. A link of infinite bandwidth
// stands for memory that both sides map: its copies take no time and touch no memory.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_COPY_ENGINE_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_COPY_ENGINE_H_

#include <deque>
#include <functional>
#include <string>

#include "server/simulator/link_curve.h"
#include "server/simulator/shared_bandwidth.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

class CopyEngine {
 public:
  // All must outlive this. `lane` is kH2D or kD2H; `timeline` may be null.
  CopyEngine(VirtualTime* time, SharedBandwidth* host_memory, LinkCurve curve, Lane lane, Timeline* timeline);

  // `done` is called when the copy's last byte has arrived, never from inside of Copy. `bytes` is above zero. `name` is
  // what the timeline calls it.
  void Copy(double bytes, std::string name, std::function<void()> done);

  // As a copy at `limit` bytes per second where that is less than the link's: pageable memory, for example.
  void Copy(double bytes, double limit, std::string name, std::function<void()> done);

  double busy_seconds() const { return busy_seconds_; }  // of copies that are done
  bool idle() const { return copies_.empty(); }

 private:
  struct Request {
    double bytes = 0;
    double limit = 0;
    std::string name;
    std::function<void()> done;
  };

  void Begin();
  void Finish();

  VirtualTime* const time_;
  SharedBandwidth* const host_memory_;
  const LinkCurve curve_;
  const Lane lane_;
  Timeline* const timeline_;
  std::deque<Request> copies_;  // the first is under way
  double begun_ = 0;
  double busy_seconds_ = 0;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_COPY_ENGINE_H_
