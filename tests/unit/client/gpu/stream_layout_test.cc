#include "client/src/gpu/stream_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace superoffload::client {
namespace {

constexpr uint64_t kPage = 4096;

class StreamLayoutTest : public ::testing::Test {
 protected:
  // Bytes [offset, offset + bytes) of the parameters.
  void Add(uint32_t unit, uint64_t offset, uint64_t bytes) {
    superoffload_bucket bucket{};
    bucket.unit = unit;
    bucket.gpu_offset = offset;
    bucket.elements = bytes / 2;
    bucket.dtype = 1;  // bfloat16
    buckets_.push_back(bucket);
  }
  Code LayOut(uint32_t slots) {
    offsets_.assign(buckets_.size(), 0);
    const Status status = LayOutStreams(buckets_, slots, offsets_, &bytes_);
    for (size_t i = 0; status.ok() && i < buckets_.size(); ++i) {
      EXPECT_EQ(offsets_[i] % kPage, buckets_[i].gpu_offset % kPage) << i;
      EXPECT_LE(offsets_[i] + 2 * buckets_[i].elements, bytes_) << i;
    }
    return status.code;
  }

  std::vector<superoffload_bucket> buckets_;
  std::vector<uint64_t> offsets_;
  uint64_t bytes_ = 0;
};

// As the daemon lays buckets out: the last layer's first.
TEST_F(StreamLayoutTest, UnitsTakeTurnsAtSlotsBehindWhatStays) {
  Add(0, 0, 256);
  Add(3, 256, 6000);
  Add(2, 6400, 1000);
  Add(2, 7424, 1000);
  Add(1, 8448, 2000);
  Add(0, 10496, 5000);
  ASSERT_EQ(LayOut(2), Code::kOk);
  EXPECT_EQ(offsets_[0], 0u);
  EXPECT_EQ(offsets_[5] / kPage, 1u) << "what stays is moved together";
  const uint64_t slots = (offsets_[5] + 5000 + kPage - 1) / kPage * kPage;
  const uint64_t first = offsets_[4] / kPage * kPage, second = offsets_[2] / kPage * kPage;
  EXPECT_EQ(first, slots);
  EXPECT_EQ(second, slots + 2 * kPage) << "each has room for the largest unit";
  EXPECT_EQ(offsets_[1] / kPage * kPage, first) << "the third unit's turn is at the first slot";
  EXPECT_EQ(offsets_[3] - offsets_[2], 1024u) << "a unit stays as it is";
  EXPECT_EQ(bytes_, slots + 4 * kPage);
}

TEST_F(StreamLayoutTest, MoreSlotsThanUnitsTakeNoMemory) {
  Add(1, 0, 512);
  Add(2, 512, 512);
  ASSERT_EQ(LayOut(8), Code::kOk);
  EXPECT_EQ(bytes_, 2 * kPage);
}

TEST_F(StreamLayoutTest, WithoutUnitsEverythingStaysWhereItIs) {
  Add(0, 512, 512);
  Add(0, 0, 512);
  ASSERT_EQ(LayOut(0), Code::kOk);
  EXPECT_EQ(offsets_, (std::vector<uint64_t>{512, 0}));
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
