#include "server/engine/snapshot_gate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace superoffload::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<uint32_t> ClaimAll(SnapshotGate& gate) {
  std::vector<uint32_t> claimed;
  while (const std::optional<uint32_t> bucket = gate.Claim()) claimed.push_back(*bucket);
  return claimed;
}

TEST(SnapshotGateTest, HoldsEachBucketUntilItIsSaved) {
  SnapshotGate gate;
  EXPECT_FALSE(gate.Holds(1));
  EXPECT_EQ(gate.Claim(), std::nullopt);
  gate.Close(2);
  EXPECT_THAT(ClaimAll(gate), ElementsAre(0, 1));
  EXPECT_FALSE(gate.Saved(1));
  EXPECT_FALSE(gate.Holds(1));
  EXPECT_TRUE(gate.Holds(0));
}

TEST(SnapshotGateTest, ABucketThatAPassWaitsForIsSavedFirst) {
  SnapshotGate gate;
  gate.Close(4);
  gate.Await(2);
  EXPECT_TRUE(gate.anybody_waits());
  EXPECT_THAT(ClaimAll(gate), ElementsAre(2, 0, 1, 3));
  EXPECT_FALSE(gate.Saved(0));
  EXPECT_TRUE(gate.Saved(2));
  EXPECT_FALSE(gate.anybody_waits());
}

TEST(SnapshotGateTest, OpeningLetsGoWhoStillWaits) {
  SnapshotGate gate;
  gate.Close(3);
  gate.Await(1);
  EXPECT_THAT(gate.Open(), ElementsAre(1));
  EXPECT_FALSE(gate.Holds(1));
  EXPECT_EQ(gate.Claim(), std::nullopt);
  gate.Close(1);
  gate.Await(0);
  gate.ForgetAwaited();
  EXPECT_THAT(gate.Open(), IsEmpty());
}

TEST(SnapshotGateDeathTest, MisuseIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  SnapshotGate gate;
  EXPECT_DEATH(gate.Open(), "a snapshot ends twice");
  gate.Close(2);
  EXPECT_DEATH(gate.Close(2), "one snapshot at a time");
  EXPECT_DEATH(gate.Holds(2), "bucket < held_.size\\(\\) \\(2, 2\\)");
  EXPECT_DEATH(gate.Saved(0), "bucket 0 is saved but nobody has claimed it");
  gate.Claim();
  gate.Saved(0);
  EXPECT_DEATH(gate.Saved(0), "bucket 0 is saved twice");
  EXPECT_DEATH(gate.Await(0), "waits for bucket 0, which nothing holds");
}

}  // namespace
}  // namespace superoffload::engine
