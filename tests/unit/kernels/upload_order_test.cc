#include "kernels/cuda/upload_order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace superoffload::kernels {
namespace {

std::vector<uint32_t> TakeAll(UploadOrder* order) {
  std::vector<uint32_t> taken;
  while (const std::optional<uint32_t> bucket = order->Take()) taken.push_back(*bucket);
  EXPECT_FALSE(order->due());
  return taken;
}

using Buckets = std::vector<uint32_t>;

TEST(UploadOrderTest, WhatWasSpeculatedGoesWithTheVerdictTheLastBucketFirst) {
  UploadOrder order;
  for (const uint32_t bucket : {3, 0, 7, 1}) order.OnPublished(1, bucket, /*speculative=*/true);
  EXPECT_EQ(TakeAll(&order), Buckets{});
  order.OnVerdict(1, /*commits=*/true, /*speculation_stands=*/true);
  EXPECT_EQ(TakeAll(&order), (Buckets{7, 3, 1, 0}));
  order.OnPublished(1, 2, /*speculative=*/false);
  order.OnPublished(1, 6, /*speculative=*/false);
  EXPECT_EQ(TakeAll(&order), (Buckets{6, 2}));
}

TEST(UploadOrderTest, AClippedStepsSpeculationIsNotTakenButWhatIsPublishedAgain) {
  UploadOrder order;
  order.OnPublished(1, 4, /*speculative=*/true);
  order.OnVerdict(1, /*commits=*/true, /*speculation_stands=*/false);
  EXPECT_EQ(TakeAll(&order), Buckets{});
  order.OnPublished(1, 4, /*speculative=*/false);
  EXPECT_EQ(TakeAll(&order), Buckets{4});
}

TEST(UploadOrderTest, ASkippedStepChangesNothing) {
  UploadOrder order;
  order.OnPublished(1, 4, /*speculative=*/true);
  order.OnVerdict(1, /*commits=*/false, /*speculation_stands=*/false);
  order.OnPublished(1, 4, /*speculative=*/false);  // what it was
  EXPECT_EQ(TakeAll(&order), Buckets{});
  order.OnPublished(2, 4, /*speculative=*/true);
  order.OnVerdict(2, /*commits=*/true, /*speculation_stands=*/true);
  EXPECT_EQ(order.step(), 2u);
  EXPECT_EQ(TakeAll(&order), Buckets{4});
}

TEST(UploadOrderTest, ALaterStepEndsTheOneBefore) {
  UploadOrder order;
  order.OnVerdict(1, /*commits=*/true, /*speculation_stands=*/false);
  order.OnPublished(1, 4, /*speculative=*/false);
  order.OnPublished(2, 5, /*speculative=*/true);
  order.OnPublished(1, 3, /*speculative=*/false);
  EXPECT_EQ(TakeAll(&order), Buckets{});
}

}  // namespace
}  // namespace superoffload::kernels
