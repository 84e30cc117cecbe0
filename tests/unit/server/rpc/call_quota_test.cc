#include "server/rpc/call_quota.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace superoffload::rpc {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

int TakeAll(CallQuota& quota, uid_t uid, absl::Time now) {
  int taken = 0;
  while (quota.Take(uid, now).ok()) ++taken;
  return taken;
}

TEST(CallQuotaTest, AUserHasTwoSecondsWorthAndGetsThemBackWithTime) {
  CallQuota quota(10);
  EXPECT_EQ(TakeAll(quota, 1, kStart), 20);
  EXPECT_EQ(TakeAll(quota, 1, kStart + absl::Milliseconds(500)), 5);
  EXPECT_EQ(TakeAll(quota, 1, kStart + absl::Hours(1)), 20);
}

TEST(CallQuotaTest, UsersDoNotStarveEachOther) {
  CallQuota quota(10);
  TakeAll(quota, 1, kStart);
  EXPECT_EQ(TakeAll(quota, 2, kStart), 20);
}

TEST(CallQuotaTest, AClockThatJumpsBackGivesAndTakesNothing) {
  CallQuota quota(10);
  TakeAll(quota, 1, kStart);
  EXPECT_EQ(TakeAll(quota, 1, kStart - absl::Hours(1)), 0);
  EXPECT_EQ(TakeAll(quota, 1, kStart - absl::Hours(1) + absl::Seconds(1)), 10);
}

TEST(CallQuotaTest, ZeroMeansNoLimitAndMayBeSetLater) {
  CallQuota quota(1);
  EXPECT_EQ(TakeAll(quota, 1, kStart), 2);
  EXPECT_THAT(quota.Take(1, kStart).message(), testing::HasSubstr("more than 1 control calls per second by uid 1"));
  quota.SetCallsPerSecond(0);
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(quota.Take(1, kStart).ok());
}

}  // namespace
}  // namespace superoffload::rpc
