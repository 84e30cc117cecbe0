// Buckets with a log of gradients, and those with one slot, train the bits of those with two slots, whoever dies when:
// a process that trains is killed again and again, and the next one goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
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
#include "tests/support/mortal_engine.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"
#include "tests/support/sums_of_squares.h"

namespace superoffload::engine {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kRoomSteps = 90;
constexpr size_t kRoomKills = 30;
constexpr double kRoomMaxGradNorm = 0.4;

OptimizerSpec Spec(const kernels::Algorithm& algorithm, uint32_t log_slots, uint32_t gradient_slots = 2,
                   bool in_place = false) {
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
  spec.logged_buckets = log_slots == 0 ? 0 : 3;
  spec.log_slots = log_slots;
  spec.gradient_slots = gradient_slots;
  spec.in_place = in_place;
  test::KeepSomeInFp32(spec);
  return spec;
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

struct Room {
  uint32_t gradient_slots, log_slots;
  bool in_place = false;
};

using RoomParameters = std::tuple<Room, size_t, const kernels::Algorithm*>;

class RoomTest : public ::testing::TestWithParam<RoomParameters> {
 protected:
  RoomTest()
      : spec_(Spec(*std::get<2>(GetParam()), room_.log_slots, room_.gradient_slots, room_.in_place)),
        layout_(*PlanLayout(spec_)) {
    std::memcpy(initial_.state.data(), memory_.state, layout_.state_bytes);
  }

  // Recovers, then trains to the end. Buckets with a log use it, but in every 40th step; all is settled around that.
  void Live() {
    test::CountingObserver observer;
    WorkerThreads pool(std::get<1>(GetParam()));
    StepEngine engine(&layout_, spec_.groups, memory_, SpeculationPolicy::kAlways, &pool, &observer);
    const uint32_t buckets = static_cast<uint32_t>(layout_.buckets.size());
    test::FinalSink sink(buckets);
    engine.Attach(&sink);
    bool bad_tried = false;
    while (engine.statistics().committed_steps < kRoomSteps) {
      const StepStatistics now = engine.statistics();
      const uint64_t t = now.committed_steps + 1;
      const bool bad = t % 7 == 0 && !std::exchange(bad_tried, t % 7 == 0 && !bad_tried);
      const bool logs = t % 40 != 0;
      if (t % 40 < 2 && !engine.WaitSettled().ok()) ::_exit(2);
      if (!engine.BeginStep(now.step + 1, 1).ok()) ::_exit(3);
      const std::vector<bool> absent = test::AbsentInStep(spec_.parameters.size(), t);
      for (uint32_t p = 0; p < absent.size(); ++p) {
        if (absent[p] && !engine.ParametersAbsent(now.step + 1, p, 1).ok()) ::_exit(4);
      }
      for (uint32_t i = 0; i < buckets; ++i) {
        const BucketLayout& bucket = layout_.buckets[i];
        const bool log = logs && bucket.log_slots > 0;
        std::byte* const to = memory_.gradients + bucket.GradientOffset(bucket.GradientSlot(t, log));
        if (bucket.one_slot()) sink.WaitFree(i);
        FillGradient(bucket, i, t, bad, to);
        const double sum = test::SumOfSquares(layout_, bucket, to, absent);
        if (!engine.GradientReady(now.step + 1, i, sum, log ? Landing::kLog : Landing::kSlot).ok()) ::_exit(5);
      }
      if (!engine.EndStep(now.step + 1, 1, kRoomMaxGradNorm).ok()) ::_exit(6);
      sink.WaitFinal();
    }
    if (!engine.WaitSettled().ok()) ::_exit(7);
  }

  // Parameters without a log may be behind where somebody has died, until they are pulled.
  void ExpectReference(bool died) {
    test::SequentialOptimizer reference(layout_, initial_.view(), spec_.groups, &kernels::Algorithm::best);
    test::Memory gradients(layout_);
    for (uint64_t t = 1; t <= kRoomSteps; ++t) {
      for (size_t i = 0; i < layout_.buckets.size(); ++i) {
        FillGradient(layout_.buckets[i], i, t, false,
                     gradients.gradients.data() + layout_.buckets[i].gradient_offsets[0]);
      }
      reference.Step(gradients.gradients.data(), 0, 1, kRoomMaxGradNorm,
                     test::AbsentInStep(spec_.parameters.size(), t));
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

  const Room room_ = std::get<0>(GetParam());
  const OptimizerSpec spec_;
  const Layout layout_;
  const test::MemoryOfProcesses processes_{layout_};
  const OptimizerMemory memory_ = processes_.view();
  test::Memory initial_{layout_};
};

TEST_P(RoomTest, TrainsTheBitsOfTwoSlots) {
  Live();
  ExpectReference(/*died=*/false);
}

TEST_P(RoomTest, KilledAgainAndAgainTrainsThemToo) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  ASSERT_NO_FATAL_FAILURE(
      test::KillAgainAndAgain(kRoomKills, std::chrono::microseconds(30000), random, [this] { Live(); }));
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
  test::FinalSink sink(static_cast<uint32_t>(layout.buckets.size()));
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
    sink.WaitFinal();
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

// Whose workers do what they are told to when they are told to, in `pool`.
struct HeldMachine {
  explicit HeldMachine(const OptimizerSpec& spec, const Layout& layout)
      : buckets(static_cast<uint32_t>(layout.buckets.size())),
        memory(layout),
        machine(&layout, spec.groups, memory.view(), SpeculationPolicy::kNever, Platform(&pool), &observer,
                [this](uint32_t pass) { machine.PassDone(pass); }),
        sink(buckets) {
    machine.Recover([] {});
    pool.RunAll();
    machine.Attach(&sink);
  }

  void Submit(uint64_t step, Landing landing) {
    ASSERT_TRUE(machine.BeginStep(step, 1).ok());
    for (uint32_t i = 0; i < buckets; ++i) ASSERT_TRUE(machine.GradientReady(step, i, 1, landing).ok());
    ASSERT_TRUE(machine.EndStep(step, 1, 0).ok());
  }

  const uint32_t buckets;
  test::Memory memory;
  test::CountingObserver observer;
  test::HeldPool pool;
  StepMachine machine;
  test::FinalSink sink;
};

StepValues ValuesOf(const OptimizerSpec& spec) {
  StepValues values{1, spec.groups[0]};
  values.scalars.insert(values.scalars.end(), spec.groups[1].begin(), spec.groups[1].end());
  return values;
}

// Each log has room for one gradient, and for that of the step to come. Workers have absorbed nothing when it comes.
TEST(LogOfGradientsTest, AVerdictThatWaitsForRoomComesWhoeverLeavesOrWantsASnapshot) {
  OptimizerSpec spec = Spec(*kernels::FindAlgorithm("adamw"), /*log_slots=*/2);
  spec.logged_buckets = kMaxBuckets;
  const Layout layout = *PlanLayout(spec);
  for (const bool leaves : {true, false}) {
    SCOPED_TRACE(leaves);
    HeldMachine held(spec, layout);
    StepMachine& machine = held.machine;
    held.Submit(1, Landing::kLog);
    held.Submit(2, Landing::kLog);
    EXPECT_EQ(machine.statistics().committed_steps, 1u) << "there was room";
    bool snapshot = false;
    if (leaves) machine.Detach();
    if (!leaves) machine.RequestSnapshot({.committed_steps = 1}, [&](const auto&) { snapshot = true; });
    held.pool.RunAll();
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
  const StepValues values = ValuesOf(spec);
  record.Commit(values, {.logged = logged});
  EXPECT_TRUE(record.Check().ok()) << record.Check();
  logged[0] = true;
  record.Commit(values, {.logged = logged});
  EXPECT_EQ(record.Check().code(), absl::StatusCode::kDataLoss);
}

std::string RoomName(const ::testing::TestParamInfo<RoomParameters>& info) {
  const auto& [room, threads, algorithm] = info.param;
  if (room.in_place) return "InPlace_" + std::to_string(threads) + "Threads_" + std::string(algorithm->name);
  return std::to_string(room.gradient_slots) + "Slots_LogOf" + std::to_string(room.log_slots) + "_" +
         std::to_string(threads) + "Threads_" + std::string(algorithm->name);
}

// Submitted too early, it has overwritten what is not absorbed. The step goes on once it is.
TEST(OneSlotTest, AGradientThatLandsTooEarlyIsRefused) {
  const OptimizerSpec spec = Spec(*kernels::FindAlgorithm("adamw"), /*log_slots=*/0, /*gradient_slots=*/1);
  const Layout layout = *PlanLayout(spec);
  HeldMachine held(spec, layout);
  StepMachine& machine = held.machine;
  held.Submit(1, Landing::kSlot);
  while (!machine.MayBegin() || !machine.BeginStep(2, 1).ok()) held.pool.RunOne();
  EXPECT_THAT(machine.GradientReady(2, 0, 1).ToString(),
              HasSubstr("FAILED_PRECONDITION: bucket 0 was submitted into its only slot, whose gradient of step 1"));
  held.pool.RunAll();
  EXPECT_TRUE(machine.GradientReady(2, 0, 1).ok());
}

// A record of two steps that the only slot cannot hold, and of one whose gradient a prepared step has taken the place
// of.
TEST(OneSlotTest, ARecordThatLacksMoreThanTheSlotHoldsIsDamaged) {
  for (const uint32_t slots : {1u, 2u}) {
    const OptimizerSpec spec = Spec(*kernels::FindAlgorithm("adamw"), /*log_slots=*/0, slots);
    const Layout layout = *PlanLayout(spec);
    test::Memory memory(layout);
    Record record(memory.view().record, layout);
    record.EndPush();
    const StepValues values = ValuesOf(spec);
    record.Commit(values, {});
    EXPECT_TRUE(record.Check().ok()) << record.Check();
    record.Prepare(values, {}, 1);
    EXPECT_EQ(record.Check().ok(), slots == 2);
    record.DropPrepared();
    record.Commit(values, {});
    EXPECT_EQ(record.Check().ok(), slots == 2);
  }
}

std::vector<const kernels::Algorithm*> ElementwiseKinds() {
  std::vector<const kernels::Algorithm*> kinds;
  for (const kernels::Algorithm* algorithm : test::EveryKindOfAlgorithm()) {
    if (algorithm->stages == nullptr) kinds.push_back(algorithm);
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Logs, RoomTest,
                         ::testing::Combine(::testing::Values(Room{2, 2}, Room{2, 5}, Room{1, 5}),
                                            ::testing::Values(1, 3), ::testing::ValuesIn(ElementwiseKinds())),
                         RoomName);
INSTANTIATE_TEST_SUITE_P(OneSlot, RoomTest,
                         ::testing::Combine(::testing::Values(Room{1, 0}), ::testing::Values(1, 3),
                                            ::testing::ValuesIn(test::EveryKindOfAlgorithm())),
                         RoomName);
INSTANTIATE_TEST_SUITE_P(InPlace, RoomTest,
                         ::testing::Combine(::testing::Values(Room{1, 0, true}), ::testing::Values(1, 3),
                                            ::testing::ValuesIn(ElementwiseKinds())),
                         RoomName);

}  // namespace
}  // namespace superoffload::engine
