#include "client/src/gpu/slot_waits.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace superoffload::client {
namespace {

superoffload_ring_entry Completion(uint16_t opcode, uint32_t index) {
  superoffload_ring_entry entry{};
  entry.opcode = opcode;
  entry.index = index;
  return entry;
}
superoffload_ring_entry Verdict(superoffload_verdict_kind kind) {
  return Completion(SUPEROFFLOAD_COMPLETE_VERDICT, kind);
}
superoffload_ring_entry Free(uint32_t bucket) { return Completion(SUPEROFFLOAD_COMPLETE_SLOT_FREE, bucket); }

// Of three buckets the first two have one slot.
class SlotWaitsTest : public ::testing::Test {
 protected:
  void Gradient(uint32_t bucket) {
    EXPECT_TRUE(waits_.SubmitGradient(bucket, Goes("g" + std::to_string(bucket))).ok());
  }
  void Step() {
    for (const uint32_t bucket : {0, 1, 2}) Gradient(bucket);
    EXPECT_TRUE(waits_.Submit(Goes("end")).ok());
  }
  void Take(const superoffload_ring_entry& entry) { EXPECT_TRUE(waits_.Take(entry).ok()); }
  SlotWaits::Go Goes(const std::string& what) {
    return [this, what] {
      gone_.push_back(what);
      return Status{};
    };
  }
  std::vector<std::string> Gone() { return std::exchange(gone_, {}); }

  SlotWaits waits_{{true, true, false}};
  std::vector<std::string> gone_;
};

using Words = std::vector<std::string>;

TEST_F(SlotWaitsTest, AGradientWaitsForTheOneBeforeItAndAllBehindItWaitToo) {
  Step();
  EXPECT_EQ(Gone(), (Words{"g0", "g1", "g2", "end"}));
  Take(Verdict(SUPEROFFLOAD_VERDICT_COMMIT));
  Step();
  EXPECT_EQ(Gone(), Words{});
  Take(Free(1));
  EXPECT_EQ(Gone(), Words{}) << "the order stays";
  Take(Free(0));
  EXPECT_EQ(Gone(), (Words{"g0", "g1", "g2", "end"}));
}

TEST_F(SlotWaitsTest, WhatIsSkippedTakesNoSlot) {
  Step();
  Take(Verdict(SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE));
  Step();
  EXPECT_EQ(Gone().size(), 8u);
  Take(Verdict(SUPEROFFLOAD_VERDICT_CLIP));
  Gradient(2);
  EXPECT_EQ(Gone(), Words{"g2"}) << "it has two slots";
  Gradient(1);
  EXPECT_EQ(Gone(), Words{});
}

// A daemon may say it twice, of any bucket, and of a gradient whose step is open.
TEST_F(SlotWaitsTest, NothingIsFreeThatIsNotPending) {
  Gradient(0);
  Take(Free(0));
  Take(Free(7));
  Take(Verdict(SUPEROFFLOAD_VERDICT_COMMIT));
  Gone();
  Gradient(0);
  EXPECT_EQ(Gone(), Words{});
  Take(Free(0));
  EXPECT_EQ(Gone(), Words{"g0"});
}

TEST_F(SlotWaitsTest, NothingGoesAfterTheStop) {
  Step();
  Take(Verdict(SUPEROFFLOAD_VERDICT_COMMIT));
  Gradient(0);
  Gone();
  waits_.Stop();
  Take(Free(0));
  Gradient(2);
  EXPECT_EQ(Gone(), Words{});
}

TEST_F(SlotWaitsTest, AnErrorIsTold) {
  const auto fails = [] { return Error(Code::kInternal, "why"); };
  EXPECT_EQ(waits_.SubmitGradient(0, fails).message, "why");
  Take(Verdict(SUPEROFFLOAD_VERDICT_COMMIT));
  EXPECT_TRUE(waits_.SubmitGradient(0, fails).ok());
  EXPECT_EQ(waits_.Take(Free(0)).message, "why");
}

}  // namespace
}  // namespace superoffload::client
