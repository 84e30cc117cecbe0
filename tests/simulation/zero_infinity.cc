// Parameters live on the host. Each unit's are copied up before its forward and again before its backward, one unit
// ahead of the GPU; its gradients are copied down after its backward and added up on the CPU. The step is
// ZeRO-Offload's.
#include <string>
#include <vector>

#include "tests/simulation/peers.h"
#include "tests/simulation/rig.h"

namespace superoffload::simulator {
namespace {

constexpr double kParameterBytes = 2, kGradientBytes = 2;

class StreamedStep {
 public:
  StreamedStep(const Machine& machine, const Workload& workload, const PeerCosts& costs)
      : machine_(machine), workload_(workload), costs_(costs), elements_(UnitElements(workload.model)), rig_(machine) {}

  double Simulate() {
    for (uint64_t i = 0; i < workload_.accumulation; ++i) {
      for (size_t unit = 0; unit < elements_.size(); ++unit) Visit(unit, workload_.units[unit].forward, "forward");
      for (size_t unit = elements_.size(); unit-- > 0;) {
        Visit(unit, workload_.units[unit].backward, "backward");
        CopyGradients(unit);
      }
    }
    rig_.time.Run();
    streamed_ = rig_.time.now();
    const double all = static_cast<double>(ParameterCount(workload_.model));
    Task("norm", all * PeerCosts::kValidateBytes, all * costs_.validate);
    Task("step", all * PeerCosts::kStepBytes, all * costs_.scalar_step);
    Task("cast", all * PeerCosts::kCastBytes, all * costs_.cast);
    rig_.time.Run();
    return rig_.time.now();
  }

  double streamed_seconds() const { return streamed_; }
  std::vector<Span> TakeTimeline() { return rig_.timeline.Take(); }

 private:
  // The copy for a unit waits until the one before the last has been computed: two units' room in HBM.
  void Visit(size_t unit, double seconds, const char* pass) {
    GpuEvent& here = events_[visits_ % 2];
    rig_.up.Wait(here);
    GpuEvent copied;
    rig_.up.Copy(&rig_.h2d, static_cast<double>(elements_[unit]) * kParameterBytes, "parameters",
                 costs_.streamed_bandwidth);
    rig_.up.Record(&copied);
    rig_.compute.Wait(copied);
    rig_.compute.Kernel(seconds, pass);
    rig_.compute.Record(&here);
    ++visits_;
  }

  void CopyGradients(size_t unit) {
    rig_.down.Wait(events_[(visits_ - 1) % 2]);
    const double elements = static_cast<double>(elements_[unit]);
    rig_.down.Copy(&rig_.d2h, elements * kGradientBytes, "gradients", costs_.streamed_bandwidth);
    rig_.down.HostCall([this, elements] {
      const double bytes = elements * PeerCosts::kAccumulateBytes;
      Task("add", bytes, bytes / machine_.host.bandwidth);
    });
  }

  void Task(const char* name, double bytes, double seconds) {
    rig_.cpu.Run({.name = name, .bytes = bytes, .seconds = seconds, .delay = 0, .done = [] {}});
  }

  const Machine& machine_;
  const Workload& workload_;
  const PeerCosts& costs_;
  const std::vector<uint64_t> elements_;
  Rig rig_;
  GpuEvent events_[2];
  size_t visits_ = 0;
  double streamed_ = 0;
};

class ZeroInfinity : public Schedule {
 public:
  explicit ZeroInfinity(const PeerCosts& costs) : costs_(costs) {}

  Outcome Run(const Machine& machine, const Workload& workload, const RunOptions& options) const override {
    StreamedStep run(machine, workload, costs_);
    const double seconds = run.Simulate();
    const double waited = run.streamed_seconds() - workload.compute_seconds();
    Outcome outcome = MakeOutcome(machine, workload, seconds,
                                  {{"parameters and gradients in transit", waited},
                                   {"optimizer step on the CPU", seconds - run.streamed_seconds()}});
    if (options.timeline) outcome.timeline = run.TakeTimeline();
    return outcome;
  }

 private:
  const PeerCosts costs_;
};

}  // namespace

std::unique_ptr<Schedule> MakeZeroInfinity(const PeerCosts& costs) { return std::make_unique<ZeroInfinity>(costs); }

}  // namespace superoffload::simulator
