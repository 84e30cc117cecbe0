// What a step exposes: the time from END_STEP, right behind the last gradient, to the last final parameters, on the CPU
// path, for steps that commit, are clipped or are skipped. README.md beside this file has the three ways that are
// compared and a run. Never a test: times are the machine's business.
//
//   exposed_passes_bench [--elements=151000000] [--threads=2] [--rounds=3] [--steps=5] [--compute_seconds=0.6]
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "server/engine/bench/bench_optimizer.h"
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

class Bench {
 public:
  Bench()
      : optimizer_(absl::GetFlag(FLAGS_elements)),
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

  void Train(const Kind& kind, const Way& way, std::vector<double>& exposed) {
    optimizer_.MakeFinite(kind.finite);
    LastStep last;
    Nobody nobody;
    WorkerPool* const pool = way.early ? static_cast<WorkerPool*>(&threads_) : &shared_;
    StepEngine engine(&optimizer_.layout(), {optimizer_.layout().algorithm->DefaultScalars()}, optimizer_.memory(),
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
    const auto buckets = static_cast<uint32_t>(optimizer_.layout().buckets.size());
    for (uint32_t i = 0; i < buckets; ++i) {
      absl::SleepFor(2 * compute / 3 / buckets);
      SUPEROFFLOAD_CHECK(engine.GradientReady(step, i, std::nullopt).ok());
    }
    SUPEROFFLOAD_CHECK(engine.EndStep(step, 1, kind.max_grad_norm).ok());
    return last.Wait();
  }

  BenchOptimizer optimizer_;
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
