// What FSDP2 does around a rank's kernels: the whole of a unit's parameters is gathered before the unit computes, and
// its gradients are reduced and scattered behind it. All ranks do the same at the same time, so that one stands for
// all, and collectives run one after the other, as those of one NCCL communicator do.
//
// Each unit of the model is sharded by itself. One is fetched while the one before it computes, in forward as in
// backward (FSDP2's own order); a unit's parameters are freed behind it (reshard_after_forward), but for the last
// one's, which backward needs at once.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_SHARDED_UNITS_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_SHARDED_UNITS_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "server/simulator/gpu_stream.h"
#include "server/simulator/machine.h"
#include "server/simulator/timeline.h"
#include "server/simulator/virtual_time.h"
#include "server/simulator/workload.h"

namespace superoffload::simulator {

class ShardedUnits {
 public:
  // `time`, `timeline` and `compute`, on which the model's kernels run, must outlive this.
  ShardedUnits(VirtualTime* time, Timeline* timeline, GpuStream* compute, const NetworkModel& network,
               const Workload& workload);

  // On which collectives run: a gathering waits for what was enqueued here before it.
  GpuStream* network() { return &network_; }

  // Of a micro-batch: nothing is fetched before everything that has been launched is over.
  void BeginPass() { compute_->Record(&begun_); }

  // Not before the unit that was begun last has begun to compute. `read` has the network wait for this rank's shards.
  void Gather(size_t unit, const std::function<void()>& read);

  // The kernels of the unit, which are launched next, wait for its parameters.
  void Begin(size_t unit);

  // Of what has been launched of the unit; `reduced` runs when this rank has its share.
  void Reduce(size_t unit, std::function<void()> reduced);
  const GpuEvent& Reduced(size_t unit) const { return units_[unit].reduced; }

  // Of a unit's last pass, in this order: nothing but its parameters was lacking; nothing but this rank's shards kept
  // them from being gathered; they began to be.
  double lacked(size_t unit) const { return units_[unit].lacked; }
  double reading(size_t unit) const { return units_[unit].reading; }
  double gathering(size_t unit) const { return units_[unit].gathering; }

 private:
  struct Unit {
    double gather = 0, reduce = 0;  // seconds
    double lacked = 0, reading = 0, gathering = 0;
    GpuEvent gathered, reduced;
  };

  VirtualTime* const time_;
  GpuStream* const compute_;
  GpuStream network_;
  std::vector<Unit> units_;
  GpuEvent begun_;  // the unit before
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_SHARDED_UNITS_H_
