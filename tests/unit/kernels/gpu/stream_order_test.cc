#include "kernels/gpu/stream_order.h"

#include <gtest/gtest.h>

namespace superoffload::kernels {
namespace {

using Units = std::vector<uint32_t>;

Units Expected(const Units& used, size_t uses, uint32_t units = 4) {
  StreamOrder order(units);
  for (const uint32_t unit : used) order.Use(unit);
  return order.Expect(uses);
}

TEST(StreamOrderTest, WhatNobodyHasSeenIsAForwardAndABackwardPass) {
  EXPECT_EQ(Expected({0}, 7), (Units{1, 2, 3, 2, 1, 0, 1}));
  EXPECT_EQ(Expected({0, 1}, 2), (Units{2, 3}));
  EXPECT_EQ(Expected({3, 2}, 3), (Units{1, 0, 1}));
}

TEST(StreamOrderTest, WhatFollowedTheLastTimeIsExpectedToFollow) {
  EXPECT_EQ(Expected({0, 1, 2, 3, 0, 1, 2, 3}, 2), (Units{0, 1})) << "passes without gradients";
  EXPECT_EQ(Expected({0, 2, 3, 2, 0, 2, 3}, 3), (Units{2, 0, 2})) << "one is skipped";
  EXPECT_EQ(Expected({0, 1, 2, 3, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3}, 2), (Units{2, 1})) << "it was otherwise before";
}

TEST(StreamOrderTest, AUseInARowIsOne) {
  EXPECT_EQ(Expected({0, 1, 2, 3, 3, 3, 2, 2, 1, 0, 0, 1, 2, 3}, 2), (Units{2, 1}));
}

TEST(StreamOrderTest, NothingIsExpectedOfOneUnitOrBeforeTheFirst) {
  EXPECT_EQ(Expected({}, 3), Units{});
  EXPECT_EQ(Expected({0, 0}, 3, 1), Units{});
  EXPECT_EQ(Expected({0}, 3, 2), (Units{1, 0, 1}));
}

}  // namespace
}  // namespace superoffload::kernels
