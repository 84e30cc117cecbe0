// Flows that share the bandwidth of one memory: the passes of the CPU workers and the copies over the link all read and
// write the host's memory.
//
// Sharing is weighted max-min fair: every flow gets `level * weight`, but no more than its own limit, and the level is
// the highest at which the sum does not exceed the capacity. A flow's weight stands for the requests that it keeps in
// flight; a copy engine keeps far more than a core does. Rates change at the moment flows come and go.
//
//     capacity 10: flows of weight 1 and limit 2, 10, 10      ->  rates 2, 4, 4
//
// Flows of one weight and limit always have the same rate. They are one class with one count of bytes, so a change
// costs the number of classes, not of flows.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SHARED_BANDWIDTH_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SHARED_BANDWIDTH_H_

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

class SharedBandwidth {
 public:
  // `time` must outlive this. `capacity` in bytes per second, above zero.
  SharedBandwidth(VirtualTime* time, double capacity);

  SharedBandwidth(const SharedBandwidth&) = delete;
  SharedBandwidth& operator=(const SharedBandwidth&) = delete;

  // A flow of `bytes` begins; `done` is called when its last byte has moved, never from inside of Start. It moves at
  // most `limit` bytes per second. All three are above zero, except that a flow may have no bytes.
  void Start(double bytes, double limit, double weight, std::function<void()> done);

  // The weight in proportion to the limit: flows that the capacity does not suffice for slow down by the same factor.
  void Start(double bytes, double limit, std::function<void()> done) { Start(bytes, limit, limit, std::move(done)); }

  double capacity() const { return capacity_; }
  size_t flows() const { return flows_; }
  double bytes_moved() const { return bytes_moved_; }  // by flows that are done

 private:
  struct Flow {
    double bytes = 0;
    std::function<void()> done;
  };
  struct Class {
    double rate = 0;                   // of each flow
    double moved = 0;                  // by a flow that has been there since the class began
    std::multimap<double, Flow> ends;  // the value of `moved` at which the flow is done
  };
  using Key = std::pair<double, double>;  // limit / weight, limit: classes that reach their limit first come first

  void ScheduleUpdate();
  void Update();
  void Advance();
  void FinishFlows();
  void ShareCapacity();
  std::optional<double> NextEnd() const;

  VirtualTime* const time_;
  const double capacity_;
  std::map<Key, Class> classes_;
  size_t flows_ = 0;
  double bytes_moved_ = 0;
  double advanced_to_ = 0;
  std::optional<VirtualTime::Event> update_;  // the next change of rates
  bool update_is_now_ = false;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SHARED_BANDWIDTH_H_
