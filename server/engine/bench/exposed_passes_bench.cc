// What a step exposes: the time from END_STEP, right behind the last gradient, to the last final parameters, on the CPU
// path, for steps that commit, are clipped or are skipped. README.md beside this file has the three ways that are
// compared and a run. Never a test: times are the machine's business.
//
//   exposed_passes_bench [--elements=151000000] [--threads=2] [--rounds=3] [--steps=5] [--compute_seconds=0.6]
#include <sched.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "server/engine/step_engine.h"
#include "server/engine/worker_threads.h"
#include "superoffload/v1/exit_status.h"

ABSL_FLAG(uint64_t, elements, 151'000'000, "parameters");
ABSL_FLAG(size_t, threads, 2, "workers");
ABSL_FLAG(int, rounds, 3, "each has every way and every kind of step, in turn");
ABSL_FLAG(int, steps, 5, "that count, in each part of a round; two before them do not");
ABSL_FLAG(double, compute_seconds, 0.6, "that the trainer computes in a step: a third forward, two thirds backward");

namespace superoffload::engine {
namespace {

// Workers whose idle time belongs to trainers: nothing is absorbed early.
class SharedCores final : public WorkerPool {
 public:
  explicit SharedCores(WorkerPool* pool) : pool_(*pool) {}
  void Submit(ChunkJob* job, size_t chunks) override { pool_.Submit(job, chunks); }
  void Hurry(ChunkJob* job) override { pool_.Hurry(job); }
  size_t worker_count() const override { return pool_.worker_count(); }
  bool idle_work_is_free() const override { return false; }

 private:
  WorkerPool& pool_;
};

class LastStep final : public StepObserver {
 public:
  void OnPass(const PassReport&) override {}
  void OnStep(const StepReport& report) override {
    absl::MutexLock lock(&mu_);
    report_ = report;
  }
  StepReport Wait() {
    absl::MutexLock lock(&mu_);
    const auto over = [this] { return report_.has_value(); };
    mu_.Await(absl::Condition(&over));
    return *std::exchange(report_, std::nullopt);
  }

 private:
  absl::Mutex mu_;
  std::optional<StepReport> report_ ABSL_GUARDED_BY(mu_);
};

class Nobody final : public CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t, bool) override {}
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t, double) override {}
  void VerdictReached(const VerdictReport&) override {}
};

struct Kind {
  const char* name;
  double max_grad_norm;
  bool finite;
  Verdict verdict;
};
constexpr Kind kKinds[] = {{"commit", 0, true, Verdict::kCommit},
                           {"clip", 1e-3, true, Verdict::kClip},
                           {"skip", 0, false, Verdict::kSkipNonFinite}};

struct Way {
  const char* name;
  SpeculationPolicy policy;
  bool early;  // idle workers absorb
};
constexpr Way kWays[] = {{"all after the verdict", SpeculationPolicy::kNever, false},
                         {"speculation", SpeculationPolicy::kAdaptive, false},
                         {"speculation and early absorbing", SpeculationPolicy::kAdaptive, true}};

constexpr int kWarmUp = 2;

std::vector<int> Cores(size_t most) {
  cpu_set_t set;
  SUPEROFFLOAD_CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
  std::vector<int> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE && cores.size() < most; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cores.push_back(cpu);
  }
  return cores;
}

Layout MakeLayout(uint64_t elements) {
  constexpr uint64_t kMatrix = 4 << 20;
  OptimizerSpec spec;
  spec.groups = {spec.algorithm->DefaultScalars()};
  for (uint64_t i = 0; i * kMatrix < elements; ++i) {
    ParameterSpec& parameter = spec.parameters.emplace_back();
    parameter.name = std::to_string(i);
    parameter.shape = {std::min(kMatrix, elements - i * kMatrix)};
  }
  absl::StatusOr<Layout> layout = PlanLayout(spec);
  SUPEROFFLOAD_CHECK(layout.ok(), "at least one element");
  return *std::move(layout);
}

class Bench {
 public:
  Bench()
      : layout_(MakeLayout(absl::GetFlag(FLAGS_elements))),
        parameters_(layout_.parameters_bytes),
        gradients_(layout_.gradients_bytes / sizeof(uint16_t), 0x3a83),  // 0.001 in bf16
        state_(layout_.state_bytes + kernels::kChunkElements),
        record_(Record::Bytes(layout_) / sizeof(kernels::UndoSlot) + 1),
        threads_(absl::GetFlag(FLAGS_threads), Cores(absl::GetFlag(FLAGS_threads))),
        shared_(&threads_) {}

  void Run() {
    for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      for (size_t kind = 0; kind < std::size(kKinds); ++kind) {
        for (size_t way = 0; way < std::size(kWays); ++way) Train(kKinds[kind], kWays[way], exposed_[kind][way]);
      }
    }
    std::printf("| steps | way | exposed, ms | of the first way | of the second |\n| --- | --- | --- | --- | --- |\n");
    for (size_t kind = 0; kind < std::size(kKinds); ++kind) {
      for (size_t way = 0; way < std::size(kWays); ++way) {
        const double median = Median(exposed_[kind][way]);
        std::printf("| %s | %s | %.1f | %.2f | %.2f |\n", kKinds[kind].name, kWays[way].name, 1e3 * median,
                    median / Median(exposed_[kind][0]), median / Median(exposed_[kind][1]));
      }
    }
  }

 private:
  static double Median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
  }

  // The first gradients are those of the last layers: one of the last ones is infinite.
  void MakeFinite(bool finite) {
    const BucketLayout& last = layout_.buckets.back();
    for (const uint64_t offset : last.gradient_offsets) {
      gradients_[offset / sizeof(uint16_t)] = finite ? 0x3a83 : 0x7f80;
    }
  }

  void Train(const Kind& kind, const Way& way, std::vector<double>& exposed) {
    MakeFinite(kind.finite);
    LastStep last;
    Nobody nobody;
    WorkerPool* const pool = way.early ? static_cast<WorkerPool*>(&threads_) : &shared_;
    StepEngine engine(&layout_, {layout_.algorithm->DefaultScalars()},
                      {parameters_.data(), reinterpret_cast<std::byte*>(gradients_.data()), state_.data(),
                       reinterpret_cast<std::byte*>(record_.data())},
                      way.policy, pool, &last);
    engine.Attach(&nobody);
    // What an earlier engine has left must not decide how this one speculates: a few steps teach it.
    for (int step = 0; step < kWarmUp + absl::GetFlag(FLAGS_steps); ++step) {
      const StepReport report = Step(engine, kind, last);
      SUPEROFFLOAD_CHECK(report.verdict.verdict == kind.verdict, "another verdict than meant");
      if (step >= kWarmUp) exposed.push_back(absl::ToDoubleSeconds(report.exposed_duration));
    }
    engine.Detach();
  }

  StepReport Step(StepEngine& engine, const Kind& kind, LastStep& last) const {
    const absl::Duration compute = absl::Seconds(absl::GetFlag(FLAGS_compute_seconds));
    const uint64_t step = engine.statistics().step + 1;
    absl::SleepFor(compute / 3);
    SUPEROFFLOAD_CHECK(engine.BeginStep(step, 1).ok());
    const auto buckets = static_cast<uint32_t>(layout_.buckets.size());
    for (uint32_t i = 0; i < buckets; ++i) {
      absl::SleepFor(2 * compute / 3 / buckets);
      SUPEROFFLOAD_CHECK(engine.GradientReady(step, i, std::nullopt).ok());
    }
    SUPEROFFLOAD_CHECK(engine.EndStep(step, 1, kind.max_grad_norm).ok());
    return last.Wait();
  }

  const Layout layout_;
  std::vector<std::byte> parameters_;
  std::vector<uint16_t> gradients_;
  std::vector<std::byte> state_;
  std::vector<kernels::UndoSlot> record_;  // aligned as a record is
  WorkerThreads threads_;
  SharedCores shared_;
  std::array<std::array<std::vector<double>, std::size(kWays)>, std::size(kKinds)> exposed_;
};

}  // namespace
}  // namespace superoffload::engine

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  superoffload::engine::Bench().Run();
}
