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
    options_.scalars = &scalar_;
    options_.array_offsets = &offset_;
  }
  // Of a model that has no other bucket, in memory of 200 bytes of parameters and 400 of gradients.
  Status ParseInto(std::vector<GpuBucket>* buckets) const {
    superoffload_parameter parameter{};
    parameter.name = "";
    parameter.bucket_count = 1;
    parameter.dtype = parameter.gradient_dtype = kBFloat16;
    ModelLayout model;
    if (Status status = ModelLayout::Create({&parameter, &bucket_, 1, 1, 1, 1, 1, 0}, &model); !status.ok()) {
      return status;
    }
    return ParseBuckets(model, /*parameters_bytes=*/200, /*gradients_bytes=*/400, in_place_, stream_slots_, buckets);
  }
  Code Parse() const {
    std::vector<GpuBucket> buckets;
    return ParseInto(&buckets).code;
  }

  superoffload_bucket bucket_{};
  double scalar_ = 0;
  bool in_place_ = false;
  uint32_t stream_slots_ = 0;
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

TEST_F(GpuOptionsTest, WhatStreamsHasSlotsAndIsNotPublishedInPlace) {
  bucket_.unit = 3;
  EXPECT_EQ(Parse(), Code::kInvalidArgument);
  stream_slots_ = 1;
  bucket_.gpu_offset = 32 << 20;
  EXPECT_EQ(Parse(), Code::kOk) << "behind device slots";
  bucket_.gpu_offset = 1 << 30;
  EXPECT_EQ(Parse(), Code::kInvalidArgument);
  bucket_.gpu_offset = 0;
  in_place_ = true;
  EXPECT_EQ(Parse(), Code::kFailedPrecondition);
  bucket_.unit = 0;
  EXPECT_EQ(Parse(), Code::kOk);
}

TEST_F(GpuOptionsTest, WhatNoAttachResponseSaysIsRefused) {
  EXPECT_EQ(CheckOptions(options_).code, Code::kOk);
  const std::vector<void (*)(superoffload_gpu_options*)> bad = {
      [](superoffload_gpu_options* o) { o->mover = SUPEROFFLOAD_MOVER_DIRECT + 1; },
      [](superoffload_gpu_options* o) { o->share = 2; },
      [](superoffload_gpu_options* o) { o->device_slots = SUPEROFFLOAD_MAX_DEVICE_SLOTS + 1; },
      [](superoffload_gpu_options* o) { o->next_slot = 2; },
      [](superoffload_gpu_options* o) { o->scalars = nullptr; },
      [](superoffload_gpu_options* o) { o->array_offsets = nullptr; },
  };
  for (size_t i = 0; i < bad.size(); ++i) {
    superoffload_gpu_options options = options_;
    bad[i](&options);
    EXPECT_EQ(CheckOptions(options).code, Code::kInvalidArgument) << i;
  }
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
  ASSERT_TRUE(ParseInto(&buckets).ok());
  const GpuLayout layout = PlanGpu(buckets, /*slots=*/3, /*max_tensors=*/5);
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
