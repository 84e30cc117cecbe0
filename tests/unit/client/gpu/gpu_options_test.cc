#include "client/src/gpu/gpu_options.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {
namespace {

constexpr uint32_t kBFloat16 = 1;  // DataType of optimizer.proto

class GpuOptionsTest : public ::testing::Test {
 protected:
  GpuOptionsTest() {
    bucket_.elements = 100;
    bucket_.gradient_offsets[1] = 200;
    bucket_.dtype = bucket_.gradient_dtype = kBFloat16;
    options_.bucket_count = options_.group_count = options_.parameter_count = 1;
    options_.buckets = &bucket_;
    options_.scalars = &scalar_;
    options_.array_offsets = options_.parameter_offsets = &offset_;
  }
  Code Parse() {
    std::vector<GpuBucket> buckets;
    return ParseBuckets(options_, /*parameters_bytes=*/200, /*gradients_bytes=*/400, &buckets).code;
  }

  superoffload_bucket bucket_{};
  double scalar_ = 0;
  uint64_t offset_ = 0;
  superoffload_gpu_options options_{};
};

TEST_F(GpuOptionsTest, BucketsLieInsideTheAttachment) {
  EXPECT_EQ(Parse(), Code::kOk);
  const std::vector<void (*)(superoffload_bucket*)> bad = {
      [](superoffload_bucket* b) { b->elements = 101; },
      [](superoffload_bucket* b) { b->elements = ~uint64_t{0} / 2; },
      [](superoffload_bucket* b) { b->parameters_offset = 1; },
      [](superoffload_bucket* b) { b->parameters_offset = ~uint64_t{0}; },
      [](superoffload_bucket* b) { b->gpu_offset = 1; },
      [](superoffload_bucket* b) { b->gpu_offset = ~uint64_t{0}; },
      [](superoffload_bucket* b) { b->gradient_offsets[0] = 201; },
      [](superoffload_bucket* b) { b->gradient_offsets[1] = 201; },
      [](superoffload_bucket* b) { b->dtype = 0; },
      [](superoffload_bucket* b) { b->gradient_dtype = 4; },
      [](superoffload_bucket* b) { b->group = 1; },
  };
  const superoffload_bucket good = bucket_;
  for (size_t i = 0; i < bad.size(); ++i) {
    bad[i](&bucket_);
    EXPECT_EQ(Parse(), Code::kInvalidArgument) << i;
    bucket_ = good;
  }
}

TEST_F(GpuOptionsTest, WhatNoAttachResponseSaysIsRefused) {
  EXPECT_EQ(CheckOptions(options_).code, Code::kOk);
  const std::vector<void (*)(superoffload_gpu_options*)> bad = {
      [](superoffload_gpu_options* o) { o->mover = SUPEROFFLOAD_MOVER_DIRECT + 1; },
      [](superoffload_gpu_options* o) { o->share = 2; },
      [](superoffload_gpu_options* o) { o->device_slots = SUPEROFFLOAD_MAX_DEVICE_SLOTS + 1; },
      [](superoffload_gpu_options* o) { o->next_slot = 2; },
      [](superoffload_gpu_options* o) { o->buckets = nullptr; },
      [](superoffload_gpu_options* o) { o->scalars = nullptr; },
      [](superoffload_gpu_options* o) { o->parameter_count = 0; },
  };
  for (size_t i = 0; i < bad.size(); ++i) {
    superoffload_gpu_options options = options_;
    bad[i](&options);
    EXPECT_EQ(CheckOptions(options).code, Code::kInvalidArgument) << i;
  }
}

TEST_F(GpuOptionsTest, ParametersThatReachIntoABucketCountAsWell) {
  std::vector<superoffload_bucket> buckets(3);
  for (uint64_t i = 0; i < 3; ++i) buckets[i].state_offset = 100 * i, buckets[i].elements = 100;
  const auto most = [&](std::vector<uint64_t> offsets) {
    options_.buckets = buckets.data();
    options_.bucket_count = 3;
    options_.parameter_offsets = offsets.data();
    options_.parameter_count = static_cast<uint32_t>(offsets.size());
    size_t parts = 0;
    for (const std::vector<StatePart>& of_bucket : CutIntoParts(options_)) parts = std::max(parts, of_bucket.size());
    return parts;
  };
  EXPECT_EQ(most({0}), 1u) << "one lies in all of them";
  EXPECT_EQ(most({0, 50, 100, 200}), 2u);
  EXPECT_EQ(most({250, 240, 0}), 3u) << "the first reaches into the last bucket; in any order";
  EXPECT_EQ(most({0, 100, 110, 120, 199, 200}), 4u);
}

TEST_F(GpuOptionsTest, ManySlotsTakeLittleOfWhatIsLeftOrAreNotTaken) {
  constexpr uint64_t kFew = 100, kMany = 120;
  EXPECT_TRUE(ManySlotsPay(kFew, kMany, kFew + 20 * 50));
  EXPECT_FALSE(ManySlotsPay(kFew, kMany, kFew + 20 * 50 - 1));
  EXPECT_FALSE(ManySlotsPay(kFew, kMany, kMany)) << "they fit, and leave nothing";
  EXPECT_FALSE(ManySlotsPay(kFew, kMany, 0));
}

TEST_F(GpuOptionsTest, NotesAddUpAndEndWhereTheFieldDoes) {
  superoffload_gpu_report report{};
  Note("one", &report);
  Note("two", &report);
  EXPECT_STREQ(report.notes, "one; two");
  Note(std::string(1000, 'x'), &report);
  EXPECT_EQ(std::string(report.notes).size(), sizeof(report.notes) - 1);
}

// The daemon maps the memory by the same numbers.
TEST_F(GpuOptionsTest, NothingInTheGpusMemoryOverlaps) {
  std::vector<GpuBucket> buckets;
  ASSERT_TRUE(ParseBuckets(options_, 200, 400, &buckets).ok());
  const GpuLayout layout = PlanGpu(buckets, /*parameters_bytes=*/200, /*slots=*/3, /*max_tensors=*/5);
  EXPECT_GE(layout.slots.offset, 200u);
  EXPECT_GE(layout.slots.bytes, buckets[0].gradient_bytes());
  EXPECT_GE(layout.slots.sums_offset, layout.slots.slot_offset(3));
  EXPECT_GE(layout.slots.sums_bytes, buckets[0].chunks() * sizeof(double));
  EXPECT_GE(layout.bytes, layout.slots.sums_of(3));
  EXPECT_EQ(layout.most_tensors, 5u);
  EXPECT_EQ(layout.most_chunks, 1u);
}

}  // namespace
}  // namespace superoffload::client
