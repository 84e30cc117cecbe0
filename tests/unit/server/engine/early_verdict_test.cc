// Verdicts that need no pass, since every gradient came with its sum of squares: what still speculates holds nothing
// up. And the order of passes, which run when a test says so.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "kernels/base/check.h"
#include "server/engine/step_machine.h"
#include "tests/support/counting_observer.h"
#include "tests/support/held_pool.h"
#include "tests/support/scalars.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::engine {
namespace {

class CountingSink final : public CompletionSink {
 public:
  void SlotFree(uint64_t, uint32_t, uint32_t) override {}
  void ParametersReady(uint64_t, uint32_t bucket, bool speculative) override {
    ++(speculative ? speculated : finals);
    (speculative ? speculated_order : order).push_back(bucket);
  }
  void NormMeasured(uint64_t, double measured, double) override { norm = measured; }
  void Prepared(uint64_t, uint64_t, double) override {}
  void VerdictReached(const VerdictReport& report) override { verdict = report; }

  std::optional<double> norm;
  std::optional<VerdictReport> verdict;
  uint32_t speculated = 0, finals = 0;
  std::vector<uint32_t> order, speculated_order;  // of final parameters, and of the others
};

OptimizerSpec FiveBuckets() {
  OptimizerSpec spec;
  spec.groups = {test::ScalarsWith(*spec.algorithm, {{"lr", 1e-2}})};
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    ParameterSpec& parameter = spec.parameters.emplace_back();
    parameter.name = name;
    parameter.shape = {4096};
  }
  spec.bucket_bytes = 4096 * sizeof(uint16_t);
  return spec;
}

class EarlyVerdictTest : public ::testing::Test {
 protected:
  EarlyVerdictTest() {
    for (size_t i = 0; i < memory_.gradients.size() / sizeof(uint16_t); ++i) {
      test::StoreElement(memory_.gradients.data(), i, kernels::DType::kBFloat16, 1e-3f * static_cast<float>(i % 17));
    }
    machine_.Recover([] {});
    pool_.RunAll();
    machine_.Attach(&sink_);
  }

  // With a norm of 1; that of the last gradient may be another.
  void Submit(std::optional<double> last = std::nullopt) {
    const double count = buckets();
    ASSERT_TRUE(machine_.BeginStep(1, 1).ok());
    for (uint32_t i = 0; i < buckets(); ++i) {
      ASSERT_TRUE(machine_.GradientReady(1, i, i + 1 == buckets() ? last.value_or(1 / count) : 1 / count).ok());
    }
    ASSERT_LT(0u, pool_.jobs()) << "nothing speculates";
  }
  uint32_t buckets() const { return static_cast<uint32_t>(layout_.buckets.size()); }

  const OptimizerSpec spec_ = FiveBuckets();
  const Layout layout_ = *PlanLayout(spec_);
  test::Memory memory_{layout_};
  test::HeldPool pool_;
  test::CountingObserver observer_;
  CountingSink sink_;
  StepMachine machine_{&layout_,
                       spec_.groups,
                       memory_.view(),
                       SpeculationPolicy::kAlways,
                       Platform(&pool_),
                       &observer_,
                       [this](uint32_t pass) { machine_.PassDone(pass); }};
};

TEST_F(EarlyVerdictTest, AStepCommitsWhileItsLastPassesAreUnderWay) {
  Submit();
  ASSERT_TRUE(machine_.EndStep(1, 1, 0).ok());
  ASSERT_TRUE(sink_.verdict);
  EXPECT_EQ(sink_.verdict->verdict, Verdict::kCommit);
  EXPECT_EQ(sink_.verdict->committed_steps, 1u);
  EXPECT_FALSE(machine_.BetweenSteps());
  pool_.RunAll();
  EXPECT_TRUE(machine_.BetweenSteps());
  EXPECT_EQ(sink_.speculated, 0u);
  EXPECT_EQ(sink_.finals, buckets());
}

// The next forward pass reads the last bucket first.
TEST_F(EarlyVerdictTest, WhatSpeculatedWhileTheStepWasClippedIsPublishedAgain) {
  Submit();
  ASSERT_TRUE(machine_.EndStep(1, 1, 0.25).ok());
  ASSERT_TRUE(sink_.verdict);
  EXPECT_EQ(sink_.verdict->verdict, Verdict::kClip);
  pool_.RunAll();
  EXPECT_TRUE(machine_.BetweenSteps());
  EXPECT_EQ(sink_.order, (std::vector<uint32_t>{4, 3, 2, 1, 0}));
  // The same gradients, waiting for the verdict.
  test::Memory waiting(layout_);
  waiting.gradients = memory_.gradients;
  StepMachine other(&layout_, spec_.groups, waiting.view(), SpeculationPolicy::kNever, Platform(&pool_), &observer_,
                    [&other](uint32_t pass) { other.PassDone(pass); });
  other.Recover([] {});
  pool_.RunAll();
  ASSERT_TRUE(other.BeginStep(1, 1).ok());
  for (uint32_t i = 0; i < buckets(); ++i) ASSERT_TRUE(other.GradientReady(1, i, 1.0 / buckets()).ok());
  ASSERT_TRUE(other.EndStep(1, 1, 0.25).ok());
  pool_.RunAll();
  EXPECT_EQ(memory_.parameters, waiting.parameters);
  for (StepMachine* machine : {&machine_, &other}) {
    machine->Detach();
    ASSERT_TRUE(machine->Settle(0, [] {}).ok());
    pool_.RunAll();
  }
  EXPECT_EQ(memory_.state, waiting.state);
}

// Others speculate beside it.
TEST_F(EarlyVerdictTest, WhatTheStepMayStillReadIsPublishedAfterTheVerdict) {
  const std::vector<std::byte> before = memory_.parameters;
  const BucketLayout& read = layout_.buckets[2];
  ASSERT_TRUE(machine_.BeginStep(1, 1).ok());
  for (uint32_t i = 0; i < buckets(); ++i) {
    const Landing landing = i == 2 ? Landing::kSlotStillRead : Landing::kSlot;
    ASSERT_TRUE(machine_.GradientReady(1, i, std::nullopt, landing).ok());
  }
  pool_.RunAll();
  EXPECT_EQ(sink_.speculated, buckets() - 1);
  const auto same = [&] {
    return std::memcmp(memory_.parameters.data() + read.parameters_offset, before.data() + read.parameters_offset,
                       read.parameters_bytes()) == 0;
  };
  EXPECT_TRUE(same());
  ASSERT_TRUE(machine_.EndStep(1, 1, 0).ok());
  pool_.RunAll();
  EXPECT_EQ(sink_.order, std::vector<uint32_t>{2});
  EXPECT_FALSE(same());
  EXPECT_TRUE(machine_.BetweenSteps());
}

// So what is left over at the verdict is what the next forward pass needs last. Two passes have begun when the others
// come.
TEST_F(EarlyVerdictTest, OfWhatWaitsTheLastBucketSpeculatesFirst) {
  Submit();
  pool_.RunAll();
  EXPECT_EQ(sink_.speculated_order, (std::vector<uint32_t>{0, 1, 4, 3, 2}));
  ASSERT_TRUE(machine_.EndStep(1, 1, 0).ok());
  EXPECT_TRUE(machine_.BetweenSteps());
}

// Who trains takes what was not published before such a verdict for unchanged.
TEST_F(EarlyVerdictTest, ASkipWaitsForWhatSpeculates) {
  Submit(std::numeric_limits<double>::infinity());
  ASSERT_TRUE(machine_.EndStep(1, 1, 0).ok());
  EXPECT_FALSE(sink_.verdict);
  pool_.RunAll();
  ASSERT_TRUE(sink_.verdict);
  EXPECT_EQ(sink_.verdict->verdict, Verdict::kSkipNonFinite);
  EXPECT_EQ(sink_.verdict->republished_buckets, sink_.speculated);
  EXPECT_EQ(sink_.finals, sink_.speculated);
  EXPECT_TRUE(machine_.BetweenSteps());
}

TEST_F(EarlyVerdictTest, ANormWhoseSumsAreKnownIsAnsweredAtOnce) {
  Submit();
  ASSERT_TRUE(machine_.MeasureNorm(1, 1).ok());
  ASSERT_TRUE(sink_.norm);
  EXPECT_NEAR(*sink_.norm, 1, 1e-12);
  ASSERT_TRUE(machine_.AbandonStep(1).ok());
  pool_.RunAll();
}

}  // namespace
}  // namespace superoffload::engine
