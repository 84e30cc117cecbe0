#include "server/simulator/copy_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace superoffload::simulator {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;

const LinkCurve kCurve{{{10, 5}, {1000, 15}}};

TEST(LinkCurveTest, IsLinearInTheLogarithmOfTheSize) {
  EXPECT_DOUBLE_EQ(kCurve.BandwidthOf(10), 5);
  EXPECT_DOUBLE_EQ(kCurve.BandwidthOf(100), 10);
  EXPECT_DOUBLE_EQ(kCurve.BandwidthOf(1000), 15);
}

TEST(LinkCurveTest, OutsideOfItsPointsTimeBelowAndBandwidthAboveStay) {
  EXPECT_DOUBLE_EQ(1 / kCurve.BandwidthOf(1), 10 / kCurve.BandwidthOf(10));
  EXPECT_DOUBLE_EQ(kCurve.BandwidthOf(1e6), 15);
}

struct Link {
  VirtualTime time;
  SharedBandwidth memory{&time, 20};
  Timeline timeline;
  CopyEngine engine{&time, &memory, kCurve, Lane::kD2H, &timeline};
};

TEST(CopyEngineTest, CopiesRunOneAfterTheOther) {
  Link link;
  std::vector<double> ends;
  for (int i = 0; i < 2; ++i) link.engine.Copy(100, "gradient", [&] { ends.push_back(link.time.now()); });
  EXPECT_FALSE(link.engine.idle());
  link.time.Run();
  EXPECT_THAT(ends, ElementsAre(DoubleEq(10), DoubleEq(20)));
  EXPECT_TRUE(link.engine.idle());
  EXPECT_DOUBLE_EQ(link.engine.busy_seconds(), 20);
  ASSERT_EQ(link.timeline.spans().size(), 2u);
  EXPECT_EQ(link.timeline.spans()[1].lane, Lane::kD2H);
  EXPECT_DOUBLE_EQ(link.timeline.spans()[1].begin, 10);
}

TEST(CopyEngineTest, TheHostsMemoryIsSharedWithPasses) {
  Link link;
  double copied = 0;
  link.memory.Start(1000, 30, [] {});  // asks for 30 of 20, the copy for 10: three quarters and one quarter
  link.engine.Copy(100, "gradient", [&] { copied = link.time.now(); });
  link.time.Run();
  EXPECT_DOUBLE_EQ(copied, 20);
}

TEST(CopyEngineTest, AnInfiniteLinkTakesNoTimeAndNoBandwidth) {
  Link link;
  CopyEngine shared(&link.time, &link.memory, {{{1, std::numeric_limits<double>::infinity()}}}, Lane::kD2H, nullptr);
  double copied = -1, passed = -1;
  link.memory.Start(100, 20, [&] { passed = link.time.now(); });
  shared.Copy(1e6, "gradient", [&] { copied = link.time.now(); });
  EXPECT_EQ(copied, -1);
  link.time.Run();
  EXPECT_EQ(copied, 0);
  EXPECT_DOUBLE_EQ(passed, 5);
}

TEST(CopyEngineTest, ACopyMayBeSlowerThanTheLink) {
  Link link;
  double copied = 0;
  link.engine.Copy(100, 2, "pageable", [&] { copied = link.time.now(); });
  link.time.Run();
  EXPECT_DOUBLE_EQ(copied, 50);
}

}  // namespace
}  // namespace superoffload::simulator
