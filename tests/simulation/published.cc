// ZeRO-Offload and the published SuperOffload: one policy, whose features are switched on one by one.
//
// In the last micro-batch's backward a bucket's gradient goes down as soon as it is complete. Its way on the CPU is
//
//     [cast] -> step -> [cast] -> up          speculation: at once. Else: when all gradients are there and validated
//
// and the casts are on the GPU instead with gpu_cast. A step ends when the last parameters are up.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "server/simulator/fit.h"
#include "tests/simulation/peer_memory.h"
#include "tests/simulation/peers.h"
#include "tests/simulation/rig.h"

namespace superoffload::simulator {
namespace {

constexpr double kSmallBucketElements = 32.0 * (1 << 20);  // 64 MB of 2-byte gradients
constexpr double kGpuCastBytes = 6, kGpuStepBytes = 28, kResidentBytes = 14;

struct Bucket {
  double elements = 0;
  size_t unit = 0;  // whose backward completes it
};

// In the order in which backward completes them.
std::vector<Bucket> CutBuckets(const Model& model, double elements_each) {
  const std::vector<uint64_t> units = UnitElements(model);
  std::vector<Bucket> buckets;
  Bucket open;
  for (size_t unit = units.size(); unit-- > 0;) {
    for (double left = static_cast<double>(units[unit]); left > 0;) {
      const double part = std::min(left, elements_each - open.elements);
      open.elements += part;
      open.unit = unit;
      left -= part;
      if (open.elements >= elements_each) buckets.push_back(std::exchange(open, {}));
    }
  }
  if (open.elements > 0) buckets.push_back(open);
  return buckets;
}

// When the phases of a step were over.
struct Times {
  double backward = 0, gradients = 0, validated = 0, stepped = 0, end = 0;
};

class Run {
 public:
  // The last `residents` buckets stay on the GPU.
  Run(const Machine& machine, const Workload& workload, const PublishedFeatures& features, const PeerCosts& costs,
      bool gradients_stay, size_t residents)
      : machine_(machine),
        workload_(workload),
        features_(features),
        costs_(costs),
        gradients_stay_(gradients_stay),
        elements_(static_cast<double>(ParameterCount(workload.model))),
        buckets_(CutBuckets(workload.model,
                            features.repartition ? kSmallBucketElements : static_cast<double>(kSubGroupElements))),
        offloaded_(buckets_.size() - std::min(residents, buckets_.size())),
        rig_(machine) {}

  Times Simulate() {
    // Validation of the step before, beside this one's forward.
    if (features_.speculation && costs_.validate > 0) Validate(/*then=*/[] {});
    for (uint64_t i = 0; i < workload_.accumulation; ++i) {
      rig_.compute.Kernel(workload_.forward_seconds(), "forward");
      Backward(/*last=*/i + 1 == workload_.accumulation);
    }
    double residents = 0;
    for (size_t i = offloaded_; i < buckets_.size(); ++i) residents += buckets_[i].elements;
    rig_.compute.HostCall([this] { times_.backward = rig_.time.now(); });
    rig_.compute.Kernel(residents * kGpuStepBytes / machine_.gpu.memory_bandwidth, "optimizer step");
    rig_.time.Run();
    SUPEROFFLOAD_CHECK_EQ(stepped_, offloaded_, "buckets were stepped");
    times_.end = rig_.time.now();
    return times_;
  }

  std::vector<Span> TakeTimeline() { return rig_.timeline.Take(); }

 private:
  void Backward(bool last) {
    size_t bucket = 0;
    for (size_t unit = workload_.units.size(); unit-- > 0;) {
      rig_.compute.Kernel(workload_.units[unit].backward, "backward");
      rig_.compute.Record(&complete_);
      for (; bucket < offloaded_ && buckets_[bucket].unit == unit; ++bucket) {
        if (last) {
          CopyDown(buckets_[bucket]);
        } else if (!gradients_stay_) {
          AddOnHost(buckets_[bucket]);
        }
      }
    }
  }

  void AddOnHost(const Bucket& bucket) {
    rig_.down.Wait(complete_);
    rig_.down.Copy(&rig_.d2h, bucket.elements * 2, "gradients");
    rig_.down.HostCall([this, &bucket] {
      const double bytes = bucket.elements * PeerCosts::kAccumulateBytes;
      Task("add", bytes, bytes / machine_.host.bandwidth, 0, [] {});
    });
  }

  void CopyDown(const Bucket& bucket) {
    rig_.down.Wait(complete_);
    if (features_.gpu_cast) rig_.down.Kernel(bucket.elements * kGpuCastBytes / machine_.gpu.memory_bandwidth, "cast");
    rig_.down.Copy(&rig_.d2h, bucket.elements * link_bytes(), "gradients");
    rig_.down.HostCall([this, &bucket] { Arrived(bucket); });
  }

  void Arrived(const Bucket& bucket) {
    times_.gradients = rig_.time.now();
    ++arrived_;
    if (features_.speculation) {
      times_.validated = times_.gradients;
      CastThenStep(bucket);
    } else if (arrived_ == offloaded_) {
      CastAllThenStep();
    }
  }

  void CastAllThenStep() {
    if (!features_.gpu_cast) Cast(elements_, [] {});
    Validate([this] {
      times_.validated = rig_.time.now();
      for (size_t i = 0; i < offloaded_; ++i) Step(buckets_[i]);
    });
  }

  void CastThenStep(const Bucket& bucket) {
    if (features_.gpu_cast) return Step(bucket);
    Cast(bucket.elements, [this, &bucket] { Step(bucket); });
  }

  void Step(const Bucket& bucket) {
    const double seconds = bucket.elements * (features_.vector_step ? costs_.vector_step : costs_.scalar_step);
    Task("step", bucket.elements * PeerCosts::kStepBytes, seconds, costs_.handover_seconds, [this, &bucket] {
      features_.gpu_cast ? CopyUp(bucket) : Cast(bucket.elements, [this, &bucket] { CopyUp(bucket); });
    });
  }

  void CopyUp(const Bucket& bucket) {
    times_.stepped = rig_.time.now();
    ++stepped_;
    rig_.up.Copy(&rig_.h2d, bucket.elements * link_bytes(), "parameters");
    if (features_.gpu_cast) rig_.up.Kernel(bucket.elements * kGpuCastBytes / machine_.gpu.memory_bandwidth, "cast");
  }

  void Cast(double elements, std::function<void()> then) {
    Task("cast", elements * PeerCosts::kCastBytes, elements * costs_.cast, 0, std::move(then));
  }

  void Validate(std::function<void()> then) {
    Task("norm", elements_ * PeerCosts::kValidateBytes, elements_ * costs_.validate, 0, std::move(then));
  }

  void Task(const char* name, double bytes, double seconds, double delay, std::function<void()> done) {
    rig_.cpu.Run({.name = name, .bytes = bytes, .seconds = seconds, .delay = delay, .done = std::move(done)});
  }

  double link_bytes() const { return features_.gpu_cast ? 4 : 2; }

  const Machine& machine_;
  const Workload& workload_;
  const PublishedFeatures& features_;
  const PeerCosts& costs_;
  const bool gradients_stay_;  // in HBM, from micro-batch to micro-batch
  const double elements_;
  const std::vector<Bucket> buckets_;
  const size_t offloaded_;  // of buckets_
  Rig rig_;
  GpuEvent complete_;
  Times times_;
  size_t arrived_ = 0, stepped_ = 0;
};

class Published : public Schedule {
 public:
  Published(Peer peer, const PublishedFeatures& features, const PeerCosts& costs)
      : peer_(peer), features_(features), costs_(costs) {}

  Outcome Run(const Machine& machine, const Workload& workload, const RunOptions& options) const override {
    double room = machine.gpu.memory_bytes - PeerGpuMemory(peer_, machine, workload.model, workload.pass);
    const double all_gradients = 2 * static_cast<double>(ParameterCount(workload.model));
    const bool counted = peer_ == Peer::kZeroOffload;  // PeerGpuMemory has them
    const bool stay = workload.accumulation == 1 || counted || room >= all_gradients;
    if (workload.accumulation > 1 && stay && !counted) room -= all_gradients;

    size_t residents = 0;
    Times best = Simulate(machine, workload, stay, residents, nullptr);
    // The authors search a grid, too.
    for (size_t n = 1; features_.repartition && n * kSmallBucketElements * kResidentBytes <= room; n *= 2) {
      const Times times = Simulate(machine, workload, stay, n, nullptr);
      if (times.end >= best.end) continue;
      best = times;
      residents = n;
    }
    std::vector<Exposed> causes = Causes(best);
    if (features_.speculation) SplitOffNorm(machine, workload, stay, residents, best, causes);
    const double clips = ClipSeconds(machine, workload, options);
    causes.push_back({"rollbacks, and forward passes thrown away", clips});
    Outcome outcome = MakeOutcome(machine, workload, best.end + clips, std::move(causes));
    if (options.timeline) Simulate(machine, workload, stay, residents, &outcome.timeline);
    return outcome;
  }

 private:
  Times Simulate(const Machine& machine, const Workload& workload, bool stay, size_t residents,
                 std::vector<Span>* timeline) const {
    simulator::Run run(machine, workload, features_, costs_, stay, residents);
    const Times times = run.Simulate();
    if (timeline != nullptr) *timeline = run.TakeTimeline();
    return times;
  }

  // With speculation the norm of the step before comes first on the CPU, and steps wait behind it. What they would not
  // wait for if it took no time is the norm's.
  void SplitOffNorm(const Machine& machine, const Workload& workload, bool stay, size_t residents, const Times& times,
                    std::vector<Exposed>& causes) const {
    PeerCosts costs = costs_;
    costs.validate = 0;
    const Times without = simulator::Run(machine, workload, features_, costs, stay, residents).Simulate();
    const double norm = std::max(times.end - std::max(without.end, times.backward), 0.0);
    double left = norm;
    for (const size_t i : {2, 1, 0, 3}) {  // of Causes; steps on the CPU first
      const double part = std::min(causes[i].seconds, left);
      causes[i].seconds -= part;
      left -= part;
    }
    causes.push_back({"steps that wait behind the norm on the CPU", norm - left});
  }

  static std::vector<Exposed> Causes(const Times& times) {
    std::vector<Exposed> causes;
    double at = times.backward;
    const auto add = [&](const char* cause, double until) {
      causes.push_back({cause, std::max(until - at, 0.0)});
      at = std::max(at, until);
    };
    add("gradients in transit", times.gradients);
    add("norm and casts on the CPU", times.validated);
    add("optimizer step on the CPU", times.stepped);
    add("parameters in transit", times.end);
    return causes;
  }

  // A step that is clipped or skipped is found in the next forward. That forward is thrown away, the step is undone,
  // and after a clip done again; then all parameters go up.
  double ClipSeconds(const Machine& machine, const Workload& workload, const RunOptions& options) const {
    if (!features_.speculation) return 0;
    const double elements = static_cast<double>(ParameterCount(workload.model));
    const double step = elements * (features_.vector_step ? costs_.vector_step : costs_.scalar_step);
    const double up = elements * 4 / machine.h2d.BandwidthOf(kSmallBucketElements * 4);
    const double thrown_away = workload.forward_seconds() + up;
    return options.clip_rate * (thrown_away + 2 * step) + options.skip_rate * (thrown_away + step);
  }

  const Peer peer_;
  const PublishedFeatures features_;
  const PeerCosts costs_;
};

}  // namespace

std::unique_ptr<Schedule> MakeZeroOffload(const PeerCosts& costs) {
  const PublishedFeatures none{.vector_step = false, .gpu_cast = false, .speculation = false, .repartition = false};
  return std::make_unique<Published>(Peer::kZeroOffload, none, costs);
}

std::unique_ptr<Schedule> MakePublishedSuperOffload(const PublishedFeatures& features, const PeerCosts& costs) {
  return std::make_unique<Published>(Peer::kSuperOffload, features, costs);
}

}  // namespace superoffload::simulator
