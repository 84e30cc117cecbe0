#include "server/simulator/shared_bandwidth.h"

#include <gtest/gtest.h>

#include <vector>

namespace superoffload::simulator {
namespace {

struct Memory {
  VirtualTime time;
  SharedBandwidth bandwidth{&time, 10};
  std::vector<double> ends;

  void Start(double bytes, double limit, double weight) {
    const size_t flow = ends.size();
    ends.push_back(-1);
    bandwidth.Start(bytes, limit, weight, [this, flow] { ends[flow] = time.now(); });
  }
};

TEST(SharedBandwidthTest, AFlowAloneHasItsLimitOrTheCapacity) {
  Memory slow, fast;
  slow.Start(20, 2, 1);
  slow.time.Run();
  EXPECT_DOUBLE_EQ(slow.ends[0], 10);
  fast.Start(20, 40, 1);
  fast.time.Run();
  EXPECT_DOUBLE_EQ(fast.ends[0], 2);
}

TEST(SharedBandwidthTest, WhatALimitedFlowLeavesIsSharedByTheOthers) {
  Memory memory;
  memory.Start(2, 2, 1);  // a second at 2
  memory.Start(8, 10, 1);
  memory.Start(8, 10, 1);
  memory.time.Run();
  EXPECT_NEAR(memory.ends[0], 1, 1e-9);
  // 4 in the first second, the other 4 at 5 a second.
  EXPECT_NEAR(memory.ends[1], 1.8, 1e-9);
  EXPECT_NEAR(memory.ends[2], 1.8, 1e-9);
}

TEST(SharedBandwidthTest, WeightsShareWhatDoesNotSuffice) {
  Memory memory;
  memory.Start(8, 10, 4);
  memory.Start(2, 10, 1);
  memory.time.Run();
  EXPECT_NEAR(memory.ends[0], 1, 1e-9);
  EXPECT_NEAR(memory.ends[1], 1, 1e-9);
}

TEST(SharedBandwidthTest, ALaterFlowSlowsAnEarlierOneDown) {
  Memory memory;
  memory.Start(20, 10, 1);
  memory.time.After(1, [&] { memory.Start(5, 10, 1); });
  memory.time.Run();
  EXPECT_NEAR(memory.ends[1], 2, 1e-9);
  EXPECT_NEAR(memory.ends[0], 2.5, 1e-9);  // 10 + 5 + 5
}

TEST(SharedBandwidthTest, FlowsThatBeginTogetherAreAsManyAsIfEachHadBegunByItself) {
  VirtualTime time;
  SharedBandwidth memory(&time, 10);
  std::vector<double> ends;
  const auto ended = [&] { ends.push_back(time.now()); };
  const SharedBandwidth::Begun begun = memory.Start(5, 10, ended);
  EXPECT_TRUE(memory.StartAnother(begun));
  EXPECT_EQ(memory.flows(), 2u);
  const SharedBandwidth::Begun others = memory.Start(10, 10, ended);
  EXPECT_FALSE(memory.StartAnother(begun)) << "others have begun since";
  EXPECT_TRUE(memory.StartAnother(others));
  time.After(1, [&] { EXPECT_FALSE(memory.StartAnother(others)) << "time has passed"; });
  time.Run();
  EXPECT_FALSE(memory.StartAnother(others)) << "they have ended";
  ASSERT_EQ(ends.size(), 4u);
  EXPECT_NEAR(ends[0], 2, 1e-9);  // four of 2.5 a second
  EXPECT_NEAR(ends[1], 2, 1e-9);
  EXPECT_NEAR(ends[2], 3, 1e-9);  // then two of 5
  EXPECT_NEAR(ends[3], 3, 1e-9);
  EXPECT_DOUBLE_EQ(memory.bytes_moved(), 30);
}

TEST(SharedBandwidthTest, AFlowWithoutBytesEndsAtOnceButNotInsideOfStart) {
  Memory memory;
  memory.Start(0, 1, 1);
  EXPECT_EQ(memory.ends[0], -1);
  memory.time.Run();
  EXPECT_EQ(memory.ends[0], 0);
}

TEST(SharedBandwidthTest, ManyWorkersReachTheCapacityTogetherAndLoseNoByte) {
  VirtualTime time;
  SharedBandwidth memory(&time, 400e9);
  constexpr int kWorkers = 72, kFlowsEach = 200;
  constexpr double kBytes = 65536 * 30;
  int done = 0;
  std::function<void(int)> next = [&](int left) {
    if (left == 0) return;
    memory.Start(kBytes, 22e9, [&, left] {
      ++done;
      next(left - 1);
    });
  };
  for (int i = 0; i < kWorkers; ++i) next(kFlowsEach);
  time.Run();
  EXPECT_EQ(done, kWorkers * kFlowsEach);
  EXPECT_EQ(memory.flows(), 0u);
  EXPECT_DOUBLE_EQ(memory.bytes_moved(), kBytes * kWorkers * kFlowsEach);
  EXPECT_NEAR(time.now(), kBytes * kWorkers * kFlowsEach / 400e9, 1e-6);
}

}  // namespace
}  // namespace superoffload::simulator
