// Buckets with a log of gradients train the bits of those without, whoever dies when: a process that trains is killed
// again and again, and the next one goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/elements/elements.h"
#include "server/engine/step_engine.h"
#include "server/engine/step_machine.h"
#include "server/engine/worker_threads.h"
#include "tests/support/algorithm_kinds.h"
#include "tests/support/counting_observer.h"
#include "tests/support/held_pool.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"
#include "tests/support/sums_of_squares.h"

namespace superoffload::engine {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kLogSteps = 90;
constexpr size_t kLogKills = 30;
constexpr double kLogMaxGradNorm = 0.4;

OptimizerSpec Spec(const kernels::Algorithm& algorithm, uint32_t log_slots) {
  OptimizerSpec spec;
  spec.algorithm = &algorithm;
  spec.groups = {test::ScalarsWith(algorithm, {{"lr", 1e-2}, {"weight_decay", 0.1}}),
                 test::ScalarsWith(algorithm, {{"lr", 3e-3}, {"weight_decay", 0}})};
  const std::vector<std::vector<uint64_t>> shapes = {{300, 700}, {37}, {70000}, {64, 64}, {37, 19}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back(
        {.name = "layer" + std::to_string(i), .shape = shapes[i], .group = static_cast<uint32_t>(i % 2)});
  }
  spec.bucket_bytes = 1 << 17;
  spec.logged_buckets = 3;
  spec.log_slots = log_slots;
  test::KeepSomeInFp32(spec);
  return spec;
}

std::vector<bool> LogAbsent(size_t parameters, uint64_t t) {
  std::vector<bool> absent(parameters);
  for (size_t p = 0; p < parameters; ++p) absent[p] = (7 * t + p) % 5 == 0;
  return absent;
}

// Of step `t`, into the two slots of the reference, or where they land.
void FillGradient(const BucketLayout& bucket, size_t index, uint64_t t, bool bad, std::byte* to) {
  std::minstd_rand random(static_cast<uint32_t>(t * 1000 + index));
  const float size = 1e-3f * static_cast<float>(1 + t % 3);
  std::vector<float> values(bucket.elements);
  for (float& value : values) value = size * (static_cast<float>(random() % 2001) / 1000 - 1);
  if (bad && index == 0) values[5] = std::numeric_limits<float>::quiet_NaN();
  kernels::Narrow(values.size(), values.data(), {to, bucket.gradient_dtype});
}

// Knows when a step is final.
class LogSink final : public CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void NormMeasured(uint64_t, double, double) override {}
  void Prepared(uint64_t, uint64_t, double) override {}
  void ParametersReady(uint64_t, uint32_t, bool speculative) override {
    absl::MutexLock lock(&mu_);
    if (!speculative) ++final_;
  }
  void VerdictReached(const VerdictReport& report) override {
    absl::MutexLock lock(&mu_);
    verdict_ = report;
  }

  void WaitFinal(uint32_t publishing) {
    absl::MutexLock lock(&mu_);
    const auto done = [&] {
      mu_.AssertHeld();
      if (!verdict_) return false;
      if (IsSkip(verdict_->verdict)) return final_ == verdict_->republished_buckets;
      return final_ == publishing - (verdict_->speculation_stands ? verdict_->speculated_buckets : 0);
    };
    mu_.Await(absl::Condition(&done));
    final_ = 0;
    verdict_.reset();
  }

 private:
  absl::Mutex mu_;
  uint32_t final_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<VerdictReport> verdict_ ABSL_GUARDED_BY(mu_);
};

using LogParameters = std::tuple<uint32_t, size_t, const kernels::Algorithm*>;

class LogTest : public ::testing::TestWithParam<LogParameters> {
 protected:
  LogTest() : spec_(Spec(*std::get<2>(GetParam()), std::get<0>(GetParam()))), layout_(*PlanLayout(spec_)) {
    sizes_ = {layout_.parameters_bytes, layout_.gradients_bytes, layout_.state_bytes + 4096, Record::Bytes(layout_)};
    std::byte* mapped[4];
    for (int i = 0; i < 4; ++i) {
      mapped[i] = static_cast<std::byte*>(
          ::mmap(nullptr, sizes_[i], PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    }
    memory_ = {mapped[0], mapped[1], mapped[2], mapped[3]};
    for (const StateFormat& format : layout_.formats) {
      float* const masters = reinterpret_cast<float*>(memory_.state + format.Byte(0, 0));
      for (size_t i = 0; i < format.elements; ++i) masters[i] = static_cast<float>(i % 1000) * 1e-3f;
    }
  }
  ~LogTest() override {
    std::byte* const mapped[] = {memory_.parameters, memory_.gradients, memory_.state, memory_.record};
    for (int i = 0; i < 4; ++i) ::munmap(mapped[i], sizes_[i]);
  }

  // Recovers, then trains to the end. Buckets with a log use it, but in every 40th step; all is settled around that.
  void Live() {
    test::CountingObserver observer;
    WorkerThreads pool(std::get<1>(GetParam()));
    StepEngine engine(&layout_, spec_.groups, memory_, SpeculationPolicy::kAlways, &pool, &observer);
    const uint32_t buckets = static_cast<uint32_t>(layout_.buckets.size());
    LogSink sink;
    engine.Attach(&sink);
    bool bad_tried = false;
    while (engine.statistics().committed_steps < kLogSteps) {
      const StepStatistics now = engine.statistics();
      const uint64_t t = now.committed_steps + 1;
      const bool bad = t % 7 == 0 && !std::exchange(bad_tried, t % 7 == 0 && !bad_tried);
      const bool logs = t % 40 != 0;
      if (t % 40 < 2 && !engine.WaitSettled().ok()) ::_exit(2);
      if (!engine.BeginStep(now.step + 1, 1).ok()) ::_exit(3);
      const std::vector<bool> absent = LogAbsent(spec_.parameters.size(), t);
      for (uint32_t p = 0; p < absent.size(); ++p) {
        if (absent[p] && !engine.ParametersAbsent(now.step + 1, p, 1).ok()) ::_exit(4);
      }
      uint32_t publishing = 0;
      for (uint32_t i = 0; i < buckets; ++i) {
        const BucketLayout& bucket = layout_.buckets[i];
        const bool log = logs && bucket.log_slots > 0;
        std::byte* const to = memory_.gradients + bucket.GradientOffset(bucket.GradientSlot(t, log));
        FillGradient(bucket, i, t, bad, to);
        const double sum = test::SumOfSquares(layout_, bucket, to, absent);
        if (!engine.GradientReady(now.step + 1, i, sum, log ? Landing::kLog : Landing::kSlot).ok()) ::_exit(5);
        ++publishing;
      }
      if (!engine.EndStep(now.step + 1, 1, kLogMaxGradNorm).ok()) ::_exit(6);
      sink.WaitFinal(publishing);
    }
    if (!engine.WaitSettled().ok()) ::_exit(7);
  }

  // Parameters without a log may be behind where somebody has died, until they are pulled.
  void ExpectReference(bool died) {
    test::SequentialOptimizer reference(layout_, initial_.view(), spec_.groups, &kernels::Algorithm::best);
    test::Memory gradients(layout_);
    for (uint64_t t = 1; t <= kLogSteps; ++t) {
      for (size_t i = 0; i < layout_.buckets.size(); ++i) {
        FillGradient(layout_.buckets[i], i, t, false,
                     gradients.gradients.data() + layout_.buckets[i].gradient_offsets[0]);
      }
      reference.Step(gradients.gradients.data(), 0, 1, kLogMaxGradNorm, LogAbsent(spec_.parameters.size(), t));
    }
    test::ForEachArray(layout_, [&](const StateFormat& format, size_t array) {
      const uint64_t at = format.Byte(array, 0);
      EXPECT_EQ(std::memcmp(memory_.state + at, reference.memory().state.data() + at,
                            format.arrays[array].array.Bytes(format.elements)),
                0)
          << array;
    });
    for (size_t i = 0; i < layout_.buckets.size(); ++i) {
      const BucketLayout& bucket = layout_.buckets[i];
      if (died && bucket.log_slots == 0) continue;
      EXPECT_EQ(std::memcmp(memory_.parameters + bucket.parameters_offset,
                            reference.memory().parameters.data() + bucket.parameters_offset, bucket.parameters_bytes()),
                0)
          << "parameters of bucket " << i;
    }
  }

  const OptimizerSpec spec_;
  const Layout layout_;
  std::array<size_t, 4> sizes_;
  OptimizerMemory memory_;
  test::Memory initial_{layout_};
};

TEST_P(LogTest, TrainsTheBitsOfThoseWithout) {
  std::memcpy(initial_.state.data(), memory_.state, layout_.state_bytes);
  Live();
  ExpectReference(/*died=*/false);
}

TEST_P(LogTest, KilledAgainAndAgainTrainsThemToo) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::memcpy(initial_.state.data(), memory_.state, layout_.state_bytes);
  size_t kills = 0;
  for (int status = -1; !(WIFEXITED(status) && WEXITSTATUS(status) == 0);) {
    const pid_t child = ::fork();
    if (child == 0) {
      Live();
      ::_exit(0);
    }
    if (kills < kLogKills) {
      std::this_thread::sleep_for(std::chrono::microseconds(1000 + random() % 30000));
      ::kill(child, SIGKILL);
      ++kills;
    }
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << "exit " << WEXITSTATUS(status);
  }
  ExpectReference(/*died=*/true);
}

// Of bucket 0, which has no log, and of bucket 6, which has one and does not absorb after step 1.
TEST(LogOfGradientsTest, WhatDoesNotBelongThereIsRefusedAndTheStepGoesOn) {
  const OptimizerSpec spec = Spec(*kernels::FindAlgorithm("adamw"), /*log_slots=*/5);
  const Layout layout = *PlanLayout(spec);
  test::Memory memory(layout);
  test::CountingObserver observer;
  WorkerThreads pool(1);
  StepEngine engine(&layout, spec.groups, memory.view(), SpeculationPolicy::kNever, &pool, &observer);
  LogSink sink;
  engine.Attach(&sink);
  const auto submit = [&](uint64_t step, uint32_t bucket, std::optional<double> sum, Landing landing) {
    const absl::Status status = engine.GradientReady(step, bucket, sum, landing);
    return status.ToString();
  };
  const auto train = [&](uint64_t step) {
    for (uint32_t i = 0; i < layout.buckets.size(); ++i) {
      const bool logs = layout.buckets[i].log_slots > 0;
      const absl::Status status = engine.GradientReady(step, i, 1, logs ? Landing::kLog : Landing::kSlot);
      EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status)) << status;
    }
    ASSERT_TRUE(engine.EndStep(step, 1, 0).ok());
    sink.WaitFinal(static_cast<uint32_t>(layout.buckets.size()));
  };
  ASSERT_EQ(layout.buckets[0].log_slots, 0u);
  ASSERT_EQ(layout.buckets[6].log_slots, 5u);
  ASSERT_TRUE(engine.BeginStep(1, 1).ok());
  EXPECT_THAT(submit(1, 0, 1, Landing::kLog),
              HasSubstr("INVALID_ARGUMENT: bucket 0 was submitted into its log, but has"));
  EXPECT_THAT(submit(1, 6, std::nullopt, Landing::kLog),
              HasSubstr("INVALID_ARGUMENT: bucket 6 was submitted into its log"));
  train(1);
  ASSERT_TRUE(engine.BeginStep(2, 1).ok());
  EXPECT_THAT(submit(2, 6, 1, Landing::kSlot),
              HasSubstr("FAILED_PRECONDITION: bucket 6 was submitted into a slot while"));
  train(2);
  ASSERT_TRUE(engine.WaitSettled().ok());
  ASSERT_TRUE(engine.BeginStep(3, 1).ok());
  EXPECT_TRUE(engine.GradientReady(3, 6, 1, Landing::kSlot).ok()) << "settled in between";
  train(3);
  EXPECT_EQ(engine.statistics().committed_steps, 3u);
}

// Each log has room for one gradient, and for that of the step to come. Workers have absorbed nothing when it comes.
TEST(LogOfGradientsTest, AVerdictThatWaitsForRoomComesWhoeverLeavesOrWantsASnapshot) {
  OptimizerSpec spec = Spec(*kernels::FindAlgorithm("adamw"), /*log_slots=*/2);
  spec.logged_buckets = kMaxBuckets;
  const Layout layout = *PlanLayout(spec);
  for (const bool leaves : {true, false}) {
    SCOPED_TRACE(leaves);
    test::Memory memory(layout);
    test::CountingObserver observer;
    test::HeldPool pool;
    StepMachine machine(&layout, spec.groups, memory.view(), SpeculationPolicy::kNever, Platform(&pool), &observer,
                        [&machine](uint32_t pass) { machine.PassDone(pass); });
    machine.Recover([] {});
    pool.RunAll();
    LogSink sink;
    machine.Attach(&sink);
    const auto submit = [&](uint64_t step) {
      ASSERT_TRUE(machine.BeginStep(step, 1).ok());
      for (uint32_t i = 0; i < layout.buckets.size(); ++i) {
        ASSERT_TRUE(machine.GradientReady(step, i, 1, Landing::kLog).ok());
      }
      ASSERT_TRUE(machine.EndStep(step, 1, 0).ok());
    };
    submit(1);
    submit(2);
    EXPECT_EQ(machine.statistics().committed_steps, 1u) << "there was room";
    bool snapshot = false;
    if (leaves) machine.Detach();
    if (!leaves) machine.RequestSnapshot({.committed_steps = 1}, [&](const auto&) { snapshot = true; });
    pool.RunAll();
    EXPECT_EQ(machine.statistics().committed_steps, 2u);
    EXPECT_TRUE(machine.BetweenSteps());
    EXPECT_EQ(snapshot, !leaves);
    if (snapshot) machine.EndSnapshot();
  }
}

TEST(LogOfGradientsTest, ARecordThatNamesALogThatIsNotThereIsDamaged) {
  const OptimizerSpec spec = Spec(*kernels::FindAlgorithm("adamw"), /*log_slots=*/5);
  const Layout layout = *PlanLayout(spec);
  test::Memory memory(layout);
  Record record(memory.view().record, layout);
  record.EndPush();
  std::vector<bool> logged(layout.buckets.size());
  logged[6] = true;
  StepValues values{1, spec.groups[0]};
  values.scalars.insert(values.scalars.end(), spec.groups[1].begin(), spec.groups[1].end());
  record.Commit(values, {.logged = logged});
  EXPECT_TRUE(record.Check().ok()) << record.Check();
  logged[0] = true;
  record.Commit(values, {.logged = logged});
  EXPECT_EQ(record.Check().code(), absl::StatusCode::kDataLoss);
}

std::vector<const kernels::Algorithm*> ElementwiseKinds() {
  std::vector<const kernels::Algorithm*> kinds;
  for (const kernels::Algorithm* algorithm : test::EveryKindOfAlgorithm()) {
    if (algorithm->stages == nullptr) kinds.push_back(algorithm);
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(All, LogTest,
                         ::testing::Combine(::testing::Values(2u, 5u), ::testing::Values(1, 3),
                                            ::testing::ValuesIn(ElementwiseKinds())),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "Slots_" +
                                  std::to_string(std::get<1>(info.param)) + "Threads_" +
                                  std::string(std::get<2>(info.param)->name);
                         });

}  // namespace
}  // namespace superoffload::engine
