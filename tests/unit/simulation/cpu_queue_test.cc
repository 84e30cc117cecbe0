#include "tests/simulation/cpu_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace superoffload::simulator {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;

struct Cpu {
  VirtualTime time;
  SharedBandwidth memory{&time, 10};
  Timeline timeline;
  CpuQueue queue{&time, &memory, &timeline};
  std::vector<double> ends;

  void Run(double bytes, double seconds, double delay = 0) {
    queue.Run({.name = "step", .bytes = bytes, .seconds = seconds, .delay = delay, .done = [this] {
                 ends.push_back(time.now());
               }});
  }
};

TEST(CpuQueueTest, TasksRunOneAfterTheOtherAtTheirOwnSpeed) {
  Cpu cpu;
  cpu.Run(10, 2);
  cpu.Run(10, 3, /*delay=*/1);
  cpu.time.Run();
  EXPECT_THAT(cpu.ends, ElementsAre(DoubleEq(2), DoubleEq(6)));
  EXPECT_DOUBLE_EQ(cpu.queue.busy_seconds(), 6);
  EXPECT_DOUBLE_EQ(cpu.timeline.spans()[1].begin, 3);
}

TEST(CpuQueueTest, ATaskThatAsksForMoreThanTheMemoryHasTakesLonger) {
  Cpu cpu;
  cpu.Run(100, 2);
  cpu.time.Run();
  EXPECT_THAT(cpu.ends, ElementsAre(DoubleEq(10)));
}

}  // namespace
}  // namespace superoffload::simulator
