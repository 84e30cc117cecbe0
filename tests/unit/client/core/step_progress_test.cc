#include "client/src/core/step_progress.h"

#include <gtest/gtest.h>

namespace superoffload::client {
namespace {

constexpr uint64_t kLastStep = 4;
constexpr uint32_t kBuckets = 2;

superoffload_ring_entry Entry(uint16_t opcode, uint64_t step, uint32_t index, uint16_t flags = 0) {
  superoffload_ring_entry entry{};
  entry.opcode = opcode;
  entry.step = step;
  entry.index = index;
  entry.flags = flags;
  return entry;
}
superoffload_ring_entry Ready(uint64_t step, uint32_t bucket, bool speculative) {
  return Entry(SUPEROFFLOAD_COMPLETE_PARAMETERS_READY, step, bucket, speculative ? SUPEROFFLOAD_FLAG_SPECULATIVE : 0);
}
superoffload_ring_entry Verdict(uint64_t step, superoffload_verdict_kind kind, bool stands) {
  return Entry(SUPEROFFLOAD_COMPLETE_VERDICT, step, kind, stands ? SUPEROFFLOAD_FLAG_SPECULATION_STANDS : 0);
}

class StepProgressTest : public ::testing::Test {
 protected:
  StepProgress progress_{kLastStep, kBuckets};
};

TEST_F(StepProgressTest, SpeculatedParametersStandWithTheVerdict) {
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) progress_.Take(Ready(5, bucket, true));
  EXPECT_FALSE(progress_.IsFinal(0));
  EXPECT_TRUE(progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_COMMIT, true)));
  EXPECT_TRUE(progress_.IsFinal(0));
  EXPECT_TRUE(progress_.IsOver());
  EXPECT_EQ(progress_.step(), 5u);
}

TEST_F(StepProgressTest, ClippedParametersComeAgain) {
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) progress_.Take(Ready(5, bucket, true));
  EXPECT_TRUE(progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_CLIP, false)));
  EXPECT_FALSE(progress_.IsFinal(1));
  progress_.Take(Ready(5, 1, false));
  EXPECT_TRUE(progress_.IsFinal(1));
  EXPECT_FALSE(progress_.IsOver());
  progress_.Take(Ready(5, 0, false));
  EXPECT_TRUE(progress_.IsOver());
}

TEST_F(StepProgressTest, ASkippedStepLeavesWhatWasNotSpeculated) {
  progress_.Take(Ready(5, 1, true));
  EXPECT_FALSE(progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE, false)));
  EXPECT_TRUE(progress_.IsFinal(0));
  EXPECT_FALSE(progress_.IsFinal(1));
  progress_.Take(Ready(5, 1, false));
  EXPECT_TRUE(progress_.IsOver());
}

TEST_F(StepProgressTest, WhatComesTwiceCountsOnce) {
  progress_.Take(Ready(5, 0, true));
  progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_CLIP, false));
  for (int again = 0; again < 3; ++again) progress_.Take(Ready(5, 0, false));
  EXPECT_FALSE(progress_.IsOver()) << "bucket 1 has yet to come";
  progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_SKIP_ABANDONED, false));
  EXPECT_EQ(progress_.verdict()->kind, SUPEROFFLOAD_VERDICT_CLIP);
}

TEST_F(StepProgressTest, AStepThatIsOverSaysNothingOfTheNext) {
  progress_.Take(Verdict(6, SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE, false));
  EXPECT_FALSE(progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_COMMIT, true)));
  EXPECT_EQ(progress_.verdict()->kind, SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE);
  progress_.Take(Entry(SUPEROFFLOAD_COMPLETE_GRADIENT_NORM, 7, 0));
  EXPECT_FALSE(progress_.verdict().has_value());
  EXPECT_TRUE(progress_.norm().has_value());
}

TEST_F(StepProgressTest, AStepOnAGpuIsOverWhenItsBucketsHaveLanded) {
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) progress_.Take(Ready(5, bucket, true));
  ASSERT_TRUE(progress_.Take(Verdict(5, SUPEROFFLOAD_VERDICT_COMMIT, true)));
  progress_.ExpectLanding(1);
  EXPECT_TRUE(progress_.IsFinal(0));
  EXPECT_FALSE(progress_.IsFinal(1));
  progress_.Take(Entry(SUPEROFFLOAD_COMPLETE_LANDED, 0, 1));  // of a probe
  progress_.Take(Entry(SUPEROFFLOAD_COMPLETE_LANDED, 5, 0));  // nobody expected it
  EXPECT_FALSE(progress_.IsOver());
  progress_.Take(Entry(SUPEROFFLOAD_COMPLETE_LANDED, 5, 1));
  progress_.Take(Entry(SUPEROFFLOAD_COMPLETE_LANDED, 5, 1));
  EXPECT_TRUE(progress_.IsOver());
}

TEST_F(StepProgressTest, BucketsThatDoNotExistAreIgnored) {
  progress_.Take(Ready(5, kBuckets, false));
  progress_.Take(Entry(SUPEROFFLOAD_COMPLETE_LANDED, 5, ~0u));
  EXPECT_FALSE(progress_.IsOver());
}

}  // namespace
}  // namespace superoffload::client
