#include "kernels/gpu/upload_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace superoffload::kernels {
namespace {

constexpr size_t kBuckets = 8;

// Each lands before the next one is taken.
std::vector<uint32_t> TakeAll(UploadOrder* order) {
  std::vector<uint32_t> taken;
  while (const std::optional<UploadOrder::Upload> upload = order->Take()) {
    taken.push_back(upload->bucket);
    order->OnLanded();
  }
  EXPECT_FALSE(order->ready());
  return taken;
}

using Buckets = std::vector<uint32_t>;

TEST(UploadOrderTest, WhatWasSpeculatedGoesWithTheVerdictTheLastBucketFirst) {
  UploadOrder order(kBuckets);
  for (const uint32_t bucket : {3, 0, 7, 1}) order.OnPublished(1, bucket, /*speculative=*/true);
  EXPECT_EQ(TakeAll(&order), Buckets{});
  order.OnVerdict(1, /*commits=*/true, /*speculation_stands=*/true);
  EXPECT_EQ(TakeAll(&order), (Buckets{7, 3, 1, 0}));
  order.OnPublished(1, 2, /*speculative=*/false);
  order.OnPublished(1, 6, /*speculative=*/false);
  EXPECT_EQ(TakeAll(&order), (Buckets{6, 2}));
}

TEST(UploadOrderTest, AClippedStepsSpeculationIsNotTakenButWhatIsPublishedAgain) {
  UploadOrder order(kBuckets);
  order.OnPublished(1, 4, /*speculative=*/true);
  order.OnVerdict(1, /*commits=*/true, /*speculation_stands=*/false);
  EXPECT_EQ(TakeAll(&order), Buckets{});
  order.OnPublished(1, 4, /*speculative=*/false);
  EXPECT_EQ(TakeAll(&order), Buckets{4});
}

TEST(UploadOrderTest, ASkippedStepChangesNothing) {
  UploadOrder order(kBuckets);
  order.OnPublished(1, 4, /*speculative=*/true);
  order.OnVerdict(1, /*commits=*/false, /*speculation_stands=*/false);
  order.OnPublished(1, 4, /*speculative=*/false);  // what it was
  EXPECT_EQ(TakeAll(&order), Buckets{});
  order.OnPublished(2, 4, /*speculative=*/true);
  order.OnVerdict(2, /*commits=*/true, /*speculation_stands=*/true);
  EXPECT_EQ(TakeAll(&order), Buckets{4});
}

void Commit(uint64_t step, const Buckets& buckets, UploadOrder* order) {
  order->OnVerdict(step, /*commits=*/true, /*speculation_stands=*/false);
  for (const uint32_t bucket : buckets) order->OnPublished(step, bucket, /*speculative=*/false);
}

TEST(UploadOrderTest, AFewAreInFlightAndWhatComesLaterAndIsNeededEarlierPassesTheOthers) {
  UploadOrder order(kBuckets);
  Commit(1, {0, 1, 2}, &order);
  EXPECT_EQ(order.Take()->bucket, 2u);
  EXPECT_EQ(order.Take()->bucket, 1u);
  EXPECT_FALSE(order.Take().has_value());
  order.OnPublished(1, 7, /*speculative=*/false);
  EXPECT_FALSE(order.Take().has_value());
  order.OnLanded();
  EXPECT_EQ(order.Take()->bucket, 7u);
  EXPECT_FALSE(order.Take().has_value());
  order.OnLanded();
  EXPECT_EQ(order.Take()->bucket, 0u);
}

TEST(UploadOrderTest, WhatIsNeededNowIsTakenHoweverManyAreInFlight) {
  UploadOrder order(kBuckets);
  Commit(1, {0, 1, 2, 3}, &order);
  while (order.Take()) {
  }
  EXPECT_TRUE(order.IsDue(0));
  EXPECT_EQ(order.Take(0)->bucket, 0u);
  EXPECT_FALSE(order.IsDue(0));
  EXPECT_FALSE(order.Take(0).has_value()) << "it is under way";
  order.OnLanded();
  EXPECT_FALSE(order.ready()) << "three were in flight";
  EXPECT_EQ(order.TakeAny()->bucket, 1u);
  EXPECT_FALSE(order.TakeAny().has_value());
}

TEST(UploadOrderTest, WhatIsDueOutlivesTheStepsThatFollow) {
  UploadOrder order(kBuckets);
  Commit(1, {4, 6}, &order);
  order.OnPublished(2, 5, /*speculative=*/true);
  order.OnPublished(1, 3, /*speculative=*/false);  // of the step before the latest
  EXPECT_TRUE(order.IsDue(4));
  order.OnVerdict(2, /*commits=*/false, /*speculation_stands=*/false);
  EXPECT_TRUE(order.IsDue(4)) << "a skipped step takes nothing away";
  Commit(3, {7}, &order);
  EXPECT_EQ(TakeAll(&order), (Buckets{6, 4, 7})) << "the earlier step's first";
}

TEST(UploadOrderTest, ABucketIsDueOnceAndItsLatestParametersCount) {
  UploadOrder order(kBuckets);
  Commit(1, {4, 6}, &order);
  Commit(2, {4}, &order);
  EXPECT_EQ(order.Take()->bucket, 6u);
  const std::optional<UploadOrder::Upload> upload = order.Take();
  EXPECT_EQ(upload->step, 2u);
  EXPECT_EQ(upload->bucket, 4u);
  EXPECT_FALSE(order.TakeAny().has_value());
}

// One that ceases to be resident in the GPU has its next copy.
TEST(UploadOrderTest, ABucketThatWasNotCopiedWhenItBecameDueIsNotDueLater) {
  UploadOrder order(kBuckets);
  order.SetCopied(6, false);
  Commit(1, {4, 6}, &order);
  order.SetCopied(6, true);
  EXPECT_EQ(TakeAll(&order), Buckets{4});
}

TEST(UploadOrderTest, WhatIsNotCopiedAnyMoreIsNotDueAnyMore) {
  UploadOrder order(kBuckets);
  Commit(1, {4, 6}, &order);
  order.SetCopied(6, false);
  EXPECT_FALSE(order.IsDue(6));
  order.SetCopied(6, true);
  EXPECT_EQ(TakeAll(&order), Buckets{4});
}

// A bucket that is copied from now on is fetched once, and comes by itself when a step publishes it.
TEST(UploadOrderTest, ABucketIsFetchedUnlessItComesAnyway) {
  UploadOrder order(kBuckets);
  order.SetCopied(6, false);
  EXPECT_FALSE(order.Fetch(6));
  EXPECT_EQ(TakeAll(&order), Buckets{}) << "nobody wants it";
  order.SetCopied(6, true);
  EXPECT_TRUE(order.Fetch(6));
  EXPECT_FALSE(order.Fetch(6));
  EXPECT_EQ(TakeAll(&order), Buckets{6});
  EXPECT_FALSE(order.Fetch(6));
  EXPECT_EQ(TakeAll(&order), Buckets{}) << "it is there";
  Commit(1, {6}, &order);
  EXPECT_EQ(TakeAll(&order), Buckets{6});
  order.SetCopied(6, false);
  order.SetCopied(6, true);
  Commit(2, {6}, &order);
  order.Fetch(6);
  EXPECT_EQ(TakeAll(&order), Buckets{6}) << "once, what was published";
}

TEST(UploadOrderTest, AStepThatIsSkippedLeavesWhatIsFetched) {
  UploadOrder order(kBuckets);
  order.SetCopied(3, false);
  order.SetCopied(3, true);
  order.OnPublished(1, 3, /*speculative=*/true);
  order.OnVerdict(1, /*commits=*/false, /*speculation_stands=*/false);
  EXPECT_FALSE(order.IsDue(3));
  order.Fetch(3);
  EXPECT_EQ(TakeAll(&order), Buckets{3});
}

}  // namespace
}  // namespace superoffload::kernels
