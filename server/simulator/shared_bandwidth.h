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
// costs the number of classes, not of flows. Those that also begin together with as many bytes end together: what all
// workers do of one pass costs next to nothing for each of them.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SHARED_BANDWIDTH_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SHARED_BANDWIDTH_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "server/simulator/virtual_time.h"

namespace superoffload::simulator {

class SharedBandwidth {
 public:
  // Names flows that begin together.
  using Begun = uint64_t;

  // `time` must outlive this. `capacity` in bytes per second, above zero.
  SharedBandwidth(VirtualTime* time, double capacity);

  SharedBandwidth(const SharedBandwidth&) = delete;
  SharedBandwidth& operator=(const SharedBandwidth&) = delete;

  // A flow of `bytes` begins; `done` is called when its last byte has moved, never from inside of Start. It moves at
  // most `limit` bytes per second. All three are above zero, except that a flow may have no bytes.
  Begun Start(double bytes, double limit, double weight, std::function<void()> done);

  // The weight in proportion to the limit: flows that the capacity does not suffice for slow down by the same factor.
  Begun Start(double bytes, double limit, std::function<void()> done) {
    return Start(bytes, limit, limit, std::move(done));
  }

  // Begins another flow like that one, with the same `done`, unless others have begun since, or time has passed;
  // whether it did.
  bool StartAnother(Begun like);

  double capacity() const { return capacity_; }
  size_t flows() const { return flows_; }
  double bytes_moved() const { return bytes_moved_; }  // by flows that are done

 private:
  struct Flows {
    double end = 0;    // the class's `moved` at which they are done
    double bytes = 0;  // of each
    std::function<void()> done;
    size_t count = 1;
  };
  using Key = std::pair<double, double>;  // limit / weight, limit: classes that reach their limit first come first
  struct Class {
    Key key;
    double rate = 0;          // of each flow
    double moved = 0;         // by a flow that has been there since the class began
    std::deque<Flows> flows;  // by their ends, and as they began; never empty but while one begins
    size_t count = 0;         // of flows
  };

  Class& ClassOf(const Key& key);
  void ScheduleUpdate();
  void Update();
  void Advance();
  void FinishFlows();
  void ShareCapacity();
  std::optional<double> NextEnd() const;

  VirtualTime* const time_;
  const double capacity_;
  std::vector<Class> classes_;  // by key
  size_t flows_ = 0;
  Begun begun_ = 0;              // named last
  Class* last_class_ = nullptr;  // of what began last; null: time has passed since
  Flows* last_ = nullptr;
  double bytes_moved_ = 0;
  double advanced_to_ = 0;
  std::optional<VirtualTime::Event> update_;  // the next change of rates
  bool update_is_now_ = false;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SHARED_BANDWIDTH_H_
