#include "client/src/gpu/stream_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {
namespace {

constexpr uint64_t kPage = 4096, kGranule = kernels::kUnitGranule;

class StreamLayoutTest : public ::testing::Test {
 protected:
  // Bytes [offset, offset + bytes) of the parameters.
  void Add(uint32_t unit, uint64_t offset, uint64_t bytes) {
    superoffload_bucket bucket{};
    bucket.unit = unit;
    bucket.gpu_offset = offset;
    bucket.elements = bytes / 2;
    bucket.dtype = bucket.gradient_dtype = 1;  // bfloat16
    buckets_.push_back(bucket);
  }
  Code LayOut(uint32_t slots) {
    offsets_.assign(buckets_.size(), 0);
    const Status status = LayOutStreams(buckets_, slots, offsets_, &bytes_);
    for (size_t i = 0; status.ok() && i < buckets_.size(); ++i) {
      EXPECT_EQ(offsets_[i] % kPage, buckets_[i].gpu_offset % kPage) << i;
    }
    return status.code;
  }
  // With the most device slots that there may be.
  Code Find() {
    std::vector<GpuBucket> placed;
    for (size_t i = 0; i < buckets_.size(); ++i) {
      placed.push_back({.elements = buckets_[i].elements,
                        .gpu_offset = offsets_[i],
                        .dtype = kernels::DType::kBFloat16,
                        .gradient_dtype = kernels::DType::kBFloat16,
                        .unit = buckets_[i].unit});
    }
    return FindUnits(placed, PlanGpu(placed, SUPEROFFLOAD_MAX_DEVICE_SLOTS, 1), &units_).code;
  }

  std::vector<superoffload_bucket> buckets_;
  std::vector<uint64_t> offsets_;
  uint64_t bytes_ = 0;
  kernels::UnitRanges units_;
};

// As the daemon lays buckets out: the last layer's first.
TEST_F(StreamLayoutTest, UnitsLieBehindWhatStaysAndDeviceSlots) {
  Add(0, 0, 256);
  Add(3, 256, 6000);
  Add(2, 6400, 1000);
  Add(2, 7424, 1000);
  Add(1, 8448, 2000);
  Add(0, 10496, 5000);
  ASSERT_EQ(LayOut(2), Code::kOk);
  EXPECT_EQ(offsets_[0], 0u);
  EXPECT_EQ(offsets_[5] / kPage, 1u) << "what stays is moved together";
  const uint64_t end = (offsets_[5] + 5000 + kPage - 1) / kPage * kPage;
  EXPECT_EQ(bytes_, end + 2 * kGranule) << "two slots";
  ASSERT_EQ(Find(), Code::kOk);
  EXPECT_EQ(units_.count, 3u);
  EXPECT_EQ(units_.bytes, kGranule);
  EXPECT_EQ(units_.offset % kGranule, 0u);
  EXPECT_GE(units_.offset, end + 16 * 2 * kPage) << "gradients of 6000 bytes";
  EXPECT_EQ(offsets_[4] / kPage * kPage, units_.offset) << "in the order of their numbers";
  EXPECT_EQ(offsets_[2] / kPage * kPage, units_.offset + kGranule);
  EXPECT_EQ(offsets_[1] / kPage * kPage, units_.offset + 2 * kGranule);
  EXPECT_EQ(offsets_[3] - offsets_[2], 1024u) << "a unit stays as it is";
}

TEST_F(StreamLayoutTest, UnitsHaveAsManyAddressesAsTheLargest) {
  Add(2, 0, kGranule - 1024);
  Add(1, kGranule - 1024, kGranule + 2);
  ASSERT_EQ(LayOut(8), Code::kOk);
  EXPECT_EQ(bytes_, 4 * kGranule) << "no more slots than units";
  ASSERT_EQ(Find(), Code::kOk);
  EXPECT_EQ(units_.bytes, 2 * kGranule);
  EXPECT_EQ(offsets_[0], units_.offset + 2 * kGranule);
}

TEST_F(StreamLayoutTest, UnitsAreNotFoundWhereTheyCannotBe) {
  Add(0, 0, 512);
  Add(1, 512, 512);
  Add(2, 1024, 512);
  ASSERT_EQ(LayOut(2), Code::kOk);
  const std::vector<uint64_t> good = offsets_;
  offsets_[2] += kGranule;
  EXPECT_EQ(Find(), Code::kInvalidArgument) << "there is a gap";
  offsets_ = good;
  std::swap(offsets_[1], offsets_[2]);
  EXPECT_EQ(Find(), Code::kInvalidArgument) << "in another order";
  offsets_ = {0, 512, kGranule + 512};
  EXPECT_EQ(Find(), Code::kInvalidArgument) << "where device slots are";
}

TEST_F(StreamLayoutTest, WithoutUnitsEverythingStaysWhereItIs) {
  Add(0, 512, 512);
  Add(0, 0, 512);
  ASSERT_EQ(LayOut(0), Code::kOk);
  EXPECT_EQ(offsets_, (std::vector<uint64_t>{512, 0}));
  EXPECT_EQ(Find(), Code::kOk);
  EXPECT_EQ(units_.count, 0u);
}

TEST_F(StreamLayoutTest, WhatCannotStreamIsRefused) {
  Add(1, 0, 512);
  EXPECT_EQ(LayOut(0), Code::kInvalidArgument) << "no slots";
  Add(2, 512, 512);
  Add(1, 1024, 512);
  EXPECT_EQ(LayOut(2), Code::kInvalidArgument) << "a unit in two places";
  buckets_.pop_back();
  buckets_.back().dtype = 0;
  EXPECT_EQ(LayOut(2), Code::kInvalidArgument) << "no dtype";
}

}  // namespace
}  // namespace superoffload::client
