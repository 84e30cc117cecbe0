#include "server/simulator/gpu_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace superoffload::simulator {
namespace {

using ::testing::ElementsAre;

struct Gpu {
  VirtualTime time;
  Timeline timeline;
  GpuStream compute{&time, &timeline};
  GpuStream side{&time, &timeline};
  std::vector<double> times;

  auto Note() {
    return [this] { times.push_back(time.now()); };
  }
};

TEST(GpuStreamTest, AStreamRunsInOrderAndStreamsSideBySide) {
  Gpu gpu;
  gpu.compute.Kernel(2, "forward");
  gpu.compute.Kernel(3, "backward");
  gpu.compute.HostCall(gpu.Note());
  gpu.side.Kernel(4, "pack");
  gpu.side.HostCall(gpu.Note());
  gpu.time.Run();
  EXPECT_THAT(gpu.times, ElementsAre(4, 5));
  EXPECT_TRUE(gpu.compute.idle());
  EXPECT_EQ(gpu.compute.busy_seconds(), 5);
}

TEST(GpuStreamTest, AWaitHoldsItsStreamUntilTheRecord) {
  Gpu gpu;
  GpuEvent ready;
  gpu.compute.Kernel(2, "backward");
  gpu.compute.Record(&ready);
  gpu.side.Wait(ready);
  gpu.side.Kernel(1, "pack");
  gpu.side.HostCall(gpu.Note());
  EXPECT_FALSE(ready.complete());
  gpu.time.Run();
  EXPECT_TRUE(ready.complete());
  EXPECT_THAT(gpu.times, ElementsAre(3));
}

TEST(GpuStreamTest, AWaitIsForTheRecordThatWasLatestWhenItWasEnqueued) {
  Gpu gpu;
  GpuEvent event;
  gpu.side.Wait(event);  // never recorded: passes
  gpu.side.HostCall(gpu.Note());
  gpu.compute.Kernel(1, "a");
  gpu.compute.Record(&event);
  gpu.side.Wait(event);
  gpu.side.HostCall(gpu.Note());
  gpu.compute.Kernel(1, "b");
  gpu.compute.Record(&event);
  gpu.time.Run();
  EXPECT_THAT(gpu.times, ElementsAre(0, 1));
}

TEST(GpuStreamTest, ACopyTakesItsTurnInTheStream) {
  Gpu gpu;
  SharedBandwidth memory(&gpu.time, 100);
  CopyEngine engine(&gpu.time, &memory, {{{1, 10}}}, Lane::kD2H, nullptr);
  gpu.side.Kernel(1, "pack");
  gpu.side.Copy(&engine, 20, "gradient");
  gpu.side.HostCall(gpu.Note());
  gpu.time.Run();
  EXPECT_THAT(gpu.times, ElementsAre(3));
}

TEST(GpuStreamTest, AHostCallMayEnqueueOnItsOwnStreamAndNeverRunsInsideOfItsCaller) {
  Gpu gpu;
  bool enqueued = false;
  gpu.side.HostCall([&] {
    EXPECT_TRUE(enqueued);
    gpu.side.Kernel(1, "more");
    gpu.side.HostCall(gpu.Note());
  });
  enqueued = true;
  gpu.time.Run();
  EXPECT_THAT(gpu.times, ElementsAre(1));
}

TEST(GpuStreamTest, ManyOperationsAtOnceDoNotExhaustTheStack) {
  Gpu gpu;
  int calls = 0;
  for (int i = 0; i < 1'000'000; ++i) gpu.side.HostCall([&] { ++calls; });
  gpu.time.Run();
  EXPECT_EQ(calls, 1'000'000);
}

}  // namespace
}  // namespace superoffload::simulator
