#include "server/checkpoint/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "server/checkpoint/task.h"
#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::checkpoint {
namespace {

using optimizer::FakeHouse;
using optimizer::OptimizerPtr;

class SchedulerTest : public ::testing::Test {
 protected:
  Schedule EverySteps(uint64_t steps) const { return {.every_steps = steps, .keep = 0, .directory = "/nowhere"}; }

  FakeHouse house_;
  const OptimizerPtr optimizer_ = *house_.Create(::geteuid(), "model");
  Scheduler scheduler_{&house_.observer};
};

TEST_F(SchedulerTest, AScheduleIsReplacedAndForgotten) {
  EXPECT_EQ(scheduler_.Get(optimizer_->id()), Schedule{});
  scheduler_.Set(optimizer_, EverySteps(5)).IgnoreError();
  scheduler_.Set(optimizer_, EverySteps(7)).IgnoreError();
  EXPECT_EQ(scheduler_.Get(optimizer_->id()), EverySteps(7));
  scheduler_.Set(optimizer_, EverySteps(0)).IgnoreError();
  EXPECT_EQ(scheduler_.Get(optimizer_->id()), Schedule{});
  scheduler_.Set(optimizer_, EverySteps(5)).IgnoreError();
  scheduler_.Forget(optimizer_->id());
  EXPECT_EQ(scheduler_.Get(optimizer_->id()), Schedule{});
}

TEST_F(SchedulerTest, OfSchedulesThatAreSetAtOnceOneStays) {
  std::vector<std::thread> callers;
  for (uint64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([this, caller] {
      for (uint64_t i = 0; i < 50; ++i) scheduler_.Set(optimizer_, EverySteps(1 + caller + 4 * i)).IgnoreError();
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_GT(scheduler_.Get(optimizer_->id()).every_steps, 0u);
  scheduler_.Forget(optimizer_->id());
  EXPECT_EQ(optimizer_.use_count(), 2) << "the table's and the test's";
}

TEST_F(SchedulerTest, NothingIsScheduledAfterShutdown) {
  scheduler_.Set(optimizer_, EverySteps(5)).IgnoreError();
  scheduler_.Shutdown();
  scheduler_.Set(optimizer_, EverySteps(5)).IgnoreError();
  EXPECT_EQ(scheduler_.Get(optimizer_->id()), Schedule{});
}

TEST_F(SchedulerTest, ADirectoryIsOneSchedules) {
  const OptimizerPtr other = *house_.Create(::geteuid(), "other");
  scheduler_.Set(optimizer_, EverySteps(5)).IgnoreError();
  EXPECT_TRUE(scheduler_.CheckDirectory(optimizer_->id(), {}, EverySteps(7)).ok());
  EXPECT_EQ(scheduler_.CheckDirectory(other->id(), {}, EverySteps(7)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(scheduler_.CheckDirectory(other->id(), {}, EverySteps(0)).ok());
}

TEST_F(SchedulerTest, ATaskThatWaitsForItsStepsIsCancelled) {
  checkpoint::Task task(optimizer_,
                        {.committed_steps = 5, .directory = [](uint64_t) { return "/nowhere/checkpoint"; }});
  ASSERT_TRUE(task.Start().ok());
  EXPECT_FALSE(task.WaitEnd(absl::ZeroDuration()));
  task.Cancel();
  ASSERT_TRUE(task.WaitEnd(absl::InfiniteDuration()));
  EXPECT_EQ(task.report().status.code(), absl::StatusCode::kCancelled);
}

TEST_F(SchedulerTest, ATaskThatNobodyWaitsForIsCancelled) {
  checkpoint::Task task(optimizer_,
                        {.committed_steps = 5, .directory = [](uint64_t) { return "/nowhere/checkpoint"; }});
  ASSERT_TRUE(task.Start().ok());
}

TEST_F(SchedulerTest, ATaskReportsWhatHasFailed) {
  checkpoint::Task task(optimizer_, {.directory = [](uint64_t) { return "/nowhere/checkpoint"; }});
  EXPECT_EQ(task.Take().status.code(), absl::StatusCode::kDataLoss) << "nothing was pushed yet";
  EXPECT_EQ(task.report().status.code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace superoffload::checkpoint
