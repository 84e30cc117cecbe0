// Everything in HBM: forward, backward, and a fused step on the GPU.
#include <string>

#include "tests/simulation/peers.h"
#include "tests/simulation/rig.h"

namespace superoffload::simulator {
namespace {

constexpr double kStepBytes = 28;  // three fp32 arrays read and written, a 2-byte gradient, a 2-byte parameter

class Ddp : public Schedule {
 public:
  Outcome Run(const Machine& machine, const Workload& workload, const RunOptions& options) const override {
    Rig rig(machine);
    for (uint64_t i = 0; i < workload.accumulation; ++i) {
      rig.compute.Kernel(workload.forward_seconds(), "forward");
      rig.compute.Kernel(workload.backward_seconds(), "backward");
    }
    const double elements = static_cast<double>(ParameterCount(workload.model));
    const double step = elements * kStepBytes / machine.gpu.memory_bandwidth;
    rig.compute.Kernel(step, "optimizer step");
    rig.time.Run();
    Outcome outcome = MakeOutcome(machine, workload, rig.time.now(), {{"optimizer step on the GPU", step}});
    if (options.timeline) outcome.timeline = rig.timeline.Take();
    return outcome;
  }
};

}  // namespace

std::unique_ptr<Schedule> MakeDdp() { return std::make_unique<Ddp>(); }

}  // namespace superoffload::simulator
