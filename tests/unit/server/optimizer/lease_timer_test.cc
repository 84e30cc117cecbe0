#include "server/optimizer/lease_timer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace superoffload::optimizer {
namespace {

using ::testing::ElementsAre;

constexpr absl::Duration kNow = absl::ZeroDuration();
constexpr absl::Duration kNever = absl::InfiniteDuration();

class LeaseTimerTest : public ::testing::Test {
 protected:
  static OptimizerId Id(const std::string& name) { return {1001, name}; }

  std::vector<std::string> WaitExpired(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, count] { return expired_.size() >= count; };
    mu_.Await(absl::Condition(&enough));
    return expired_;
  }

  absl::Mutex mu_;
  std::vector<std::string> expired_;
  int again_ = 0;  // how often an expiry starts another lease
  LeaseTimer timer_{[this](const OptimizerId& id) {
    absl::MutexLock lock(&mu_);
    expired_.push_back(id.name);
    if (again_-- > 0) timer_.Start(id, kNow);
  }};
};

TEST_F(LeaseTimerTest, ALeaseRunsOutOnce) {
  timer_.Start(Id("a"), kNow);
  EXPECT_THAT(WaitExpired(1), ElementsAre("a"));
  timer_.Start(Id("b"), kNow);
  EXPECT_THAT(WaitExpired(2), ElementsAre("a", "b"));
}

TEST_F(LeaseTimerTest, WhatIsStoppedOrInfiniteDoesNotRunOut) {
  timer_.Start(Id("stopped"), absl::Hours(1));
  timer_.Stop(Id("stopped"));
  timer_.Start(Id("infinite"), kNever);
  timer_.Start(Id("a"), kNow);
  EXPECT_THAT(WaitExpired(1), ElementsAre("a"));
}

TEST_F(LeaseTimerTest, AnotherLeaseReplacesTheFirst) {
  timer_.Start(Id("longer"), absl::Hours(1));
  timer_.Start(Id("longer"), kNow);
  EXPECT_THAT(WaitExpired(1), ElementsAre("longer"));
}

TEST_F(LeaseTimerTest, AnExpiryMayStartTheNextLease) {
  again_ = 2;
  timer_.Start(Id("a"), kNow);
  EXPECT_THAT(WaitExpired(3), ElementsAre("a", "a", "a"));
}

}  // namespace
}  // namespace superoffload::optimizer
