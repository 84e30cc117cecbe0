// What a step of buckets with logs costs the workers: K gradients taken in at one reading of the state, beside passes
// that absorb and publish one. README.md beside this file has a run. Never a test: times are the machine's business.
//
//   log_bench [--elements=151000000] [--threads=1] [--rounds=3] [--steps=16]
#include <algorithm>
#include <cstdio>
#include <memory>
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
ABSL_FLAG(size_t, threads, 1, "workers");
ABSL_FLAG(int, rounds, 3, "each has every way, in turn");
ABSL_FLAG(int, steps, 16, "that count, in each round; as many as a log has slots before them do not");

namespace superoffload::engine {
namespace {

// Adds up what passes move, and counts steps that are over.
class Counter final : public StepObserver {
 public:
  void OnPass(const PassReport& report) override {
    absl::MutexLock lock(&mu_);
    bytes_ += report.bytes;
  }
  void OnStep(const StepReport&) override {
    absl::MutexLock lock(&mu_);
    ++steps_;
  }
  void WaitStep() {
    absl::MutexLock lock(&mu_);
    const auto over = [this] { return steps_ > 0; };
    mu_.Await(absl::Condition(&over));
    --steps_;
  }
  uint64_t TakeBytes() {
    absl::MutexLock lock(&mu_);
    return std::exchange(bytes_, 0);
  }

 private:
  absl::Mutex mu_;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int steps_ ABSL_GUARDED_BY(mu_) = 0;
};

constexpr uint32_t kLogSlots[] = {0, 2, 3, 5, 9};  // K + 1; 0: no logs

class Way {
 public:
  explicit Way(uint32_t log_slots) : log_slots_(log_slots), optimizer_(absl::GetFlag(FLAGS_elements), log_slots) {}

  // All gradients of a step are there at once, with their sums; nobody computes anything beside.
  void Measure() {
    WorkerThreads threads(absl::GetFlag(FLAGS_threads), Cores(absl::GetFlag(FLAGS_threads)));
    Counter counter;
    Nobody nobody;
    StepEngine engine(&optimizer_.layout(), {optimizer_.layout().algorithm->DefaultScalars()}, optimizer_.memory(),
                      SpeculationPolicy::kAlways, &threads, &counter);
    engine.Attach(&nobody);
    const int steps = absl::GetFlag(FLAGS_steps);
    Train(engine, counter, static_cast<int>(std::max(2u, log_slots_)));
    counter.TakeBytes();
    const absl::Time begin = absl::Now();
    Train(engine, counter, steps);
    const auto each = static_cast<double>(absl::GetFlag(FLAGS_elements)) * steps;
    nanoseconds_.push_back(absl::ToDoubleNanoseconds(absl::Now() - begin) / each);
    bytes_ = static_cast<double>(counter.TakeBytes()) / each;
    engine.Detach();
  }

  void Print() {
    std::nth_element(nanoseconds_.begin(), nanoseconds_.begin() + nanoseconds_.size() / 2, nanoseconds_.end());
    const double nanoseconds = nanoseconds_[nanoseconds_.size() / 2];
    if (log_slots_ == 0) std::printf("| absorb and publish | %.1f | %.3f |", bytes_, nanoseconds);
    if (log_slots_ > 0) std::printf("| log, K = %u | %.1f | %.3f |", log_slots_ - 1, bytes_, nanoseconds);
    std::printf(" %.1f |\n", bytes_ / nanoseconds);
  }

 private:
  void Train(StepEngine& engine, Counter& counter, int steps) {
    const Landing landing = log_slots_ > 0 ? Landing::kLog : Landing::kSlot;
    for (; steps > 0; --steps) {
      const uint64_t step = engine.statistics().step + 1;
      SUPEROFFLOAD_CHECK(engine.BeginStep(step, 1).ok());
      for (uint32_t i = 0; i < optimizer_.layout().buckets.size(); ++i) {
        SUPEROFFLOAD_CHECK(engine.GradientReady(step, i, 1, landing).ok());
      }
      SUPEROFFLOAD_CHECK(engine.EndStep(step, 1, 0).ok());
      counter.WaitStep();
    }
    SUPEROFFLOAD_CHECK(engine.WaitSettled().ok());
  }

  const uint32_t log_slots_;
  BenchOptimizer optimizer_;
  std::vector<double> nanoseconds_;
  double bytes_ = 0;
};

}  // namespace
}  // namespace superoffload::engine

int main(int argc, char** argv) {
  superoffload::EndWithZeroAfterHelp(argc, argv);
  absl::ParseCommandLine(argc, argv);
  std::vector<std::unique_ptr<superoffload::engine::Way>> ways;
  for (const uint32_t log_slots : superoffload::engine::kLogSlots) {
    ways.push_back(std::make_unique<superoffload::engine::Way>(log_slots));
  }
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (const auto& way : ways) way->Measure();
  }
  std::printf("| | bytes per parameter and step | ns | GB/s |\n| --- | --- | --- | --- |\n");
  for (const auto& way : ways) way->Print();
}
