#include "server/engine/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>
#include <string>

namespace superoffload::engine {
namespace {

using kernels::DType;
using ::testing::HasSubstr;

OptimizerSpec OneGroup(std::vector<std::vector<uint64_t>> shapes) {
  OptimizerSpec spec;
  spec.groups.resize(1);
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back({.name = "p" + std::to_string(i), .shape = shapes[i]});
  }
  return spec;
}

TEST(LayoutTest, TheLastRegisteredParameterComesFirst) {
  const absl::StatusOr<Layout> layout = PlanLayout(OneGroup({{64}, {128}, {64}}));
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->placements[2].state_offset, 0u);
  EXPECT_EQ(layout->placements[1].state_offset, 64u);
  EXPECT_EQ(layout->placements[0].state_offset, 192u);
}

TEST(LayoutTest, BucketsAreCutAtParameterBoundaries) {
  OptimizerSpec spec = OneGroup({{1024}, {1536}, {1024}});
  spec.bucket_bytes = 4096;  // 2048 bf16 elements
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->buckets.size(), 3u);
  EXPECT_EQ(layout->buckets[0].elements, 1024u);
  EXPECT_EQ(layout->buckets[1].elements, 1536u);
  EXPECT_EQ(layout->placements[1].first_bucket, 1u);
  EXPECT_EQ(layout->placements[1].bucket_count, 1u);
}

TEST(LayoutTest, AParameterLargerThanABucketSpansSeveralContiguously) {
  OptimizerSpec spec = OneGroup({{10, 1000}});
  spec.bucket_bytes = 4096;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->placements[0].bucket_count, 5u);
  for (size_t i = 1; i < layout->buckets.size(); ++i) {
    const BucketLayout& before = layout->buckets[i - 1];
    EXPECT_EQ(layout->buckets[i].parameters_offset, before.parameters_offset + before.elements * 2);
    EXPECT_EQ(layout->buckets[i].gradient_offsets[0], before.gradient_offsets[0] + before.elements * 2);
    EXPECT_EQ(layout->buckets[i].state_offset, before.state_offset + before.elements);
  }
}

TEST(LayoutTest, GroupsAndDtypesNeverShareABucket) {
  OptimizerSpec spec = OneGroup({{64}, {64}, {64}, {64}});
  spec.groups.resize(2);
  spec.parameters[1].group = 1;
  spec.parameters[2].dtype = DType::kFloat32;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->buckets.size(), 3u);
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const BucketLayout& bucket = layout->buckets[layout->placements[i].first_bucket];
    EXPECT_EQ(bucket.group, spec.parameters[i].group);
    EXPECT_EQ(bucket.dtype, spec.parameters[i].dtype);
  }
}

// Whatever the plan, no two parameters share a byte of any region, and buckets cover every parameter.
TEST(LayoutTest, RandomPlansNeverOverlap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    OptimizerSpec spec;
    spec.groups.resize(1 + random() % 3);
    spec.bucket_bytes = kMinBucketBytes << (random() % 5);
    const size_t count = 1 + random() % 40;
    for (size_t i = 0; i < count; ++i) {
      spec.parameters.push_back({.name = std::to_string(i),
                                 .shape = {1 + random() % 100, 1 + random() % 100},
                                 .dtype = static_cast<DType>(random() % 3),
                                 .gradient_dtype = static_cast<DType>(random() % 3),
                                 .group = static_cast<uint32_t>(random() % spec.groups.size())});
    }
    const absl::StatusOr<Layout> layout = PlanLayout(spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::vector<char> parameters(layout->parameters_bytes), gradients(layout->gradients_bytes);
    std::vector<char> state(layout->state_elements);
    const auto take = [](std::vector<char>& region, uint64_t first, uint64_t bytes) {
      ASSERT_LE(first + bytes, region.size());
      for (uint64_t i = first; i < first + bytes; ++i) ASSERT_EQ(region[i]++, 0);
    };
    for (size_t i = 0; i < count; ++i) {
      const ParameterSpec& parameter = spec.parameters[i];
      const Placement& placement = layout->placements[i];
      const uint64_t elements = ElementCount(parameter);
      take(parameters, placement.parameters_offset, elements * kernels::DTypeBytes(parameter.dtype));
      take(gradients, placement.gradient_offsets[0], elements * kernels::DTypeBytes(parameter.gradient_dtype));
      take(gradients, placement.gradient_offsets[1], elements * kernels::DTypeBytes(parameter.gradient_dtype));
      take(state, placement.state_offset, elements);
      const BucketLayout& first = layout->buckets[placement.first_bucket];
      const BucketLayout& last = layout->buckets[placement.first_bucket + placement.bucket_count - 1];
      EXPECT_LE(first.state_offset, placement.state_offset);
      EXPECT_GE(last.state_offset + last.elements, placement.state_offset + elements);
    }
  }
}

struct BadSpec {
  const char* name;
  void (*spoil)(OptimizerSpec&);
  const char* message;
};

class BadSpecTest : public ::testing::TestWithParam<BadSpec> {};

TEST_P(BadSpecTest, IsRefusedNamingTheField) {
  OptimizerSpec spec = OneGroup({{64}, {64}});
  GetParam().spoil(spec);
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(layout.status().message()), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    All, BadSpecTest,
    ::testing::Values(
        BadSpec{"NoGroup", [](OptimizerSpec& s) { s.groups.clear(); }, "groups"},
        BadSpec{"NoParameter", [](OptimizerSpec& s) { s.parameters.clear(); }, "parameters"},
        BadSpec{"UnknownGroup", [](OptimizerSpec& s) { s.parameters[1].group = 1; }, "parameters[1]"},
        BadSpec{"EmptyName", [](OptimizerSpec& s) { s.parameters[0].name = ""; }, "parameters[0]"},
        BadSpec{"TakenName", [](OptimizerSpec& s) { s.parameters[1].name = "p0"; }, "taken"},
        BadSpec{"EmptyTensor", [](OptimizerSpec& s) { s.parameters[0].shape = {0}; }, "shape"},
        BadSpec{"ShapeOverflow",
                [](OptimizerSpec& s) {
                  s.parameters[0].shape = {uint64_t{1} << 63, uint64_t{1} << 63};
                },
                "shape"},
        BadSpec{"TooManyElements", [](OptimizerSpec& s) { s.parameters[0].shape = {uint64_t{1} << 40}; }, "2^40"},
        BadSpec{"SmallBucket", [](OptimizerSpec& s) { s.bucket_bytes = 1; }, "bucket_bytes"},
        BadSpec{"TooManyBuckets",
                [](OptimizerSpec& s) {
                  s.parameters[0].shape = {uint64_t{1} << 36};
                  s.bucket_bytes = kMinBucketBytes;
                },
                "too many buckets"},
        BadSpec{"NegativeRate", [](OptimizerSpec& s) { s.groups[0].lr = -1; }, "lr"},
        BadSpec{"NanRate", [](OptimizerSpec& s) { s.groups[0].lr = std::numeric_limits<double>::quiet_NaN(); }, "lr"},
        BadSpec{"Beta1", [](OptimizerSpec& s) { s.groups[0].beta1 = 1; }, "beta1"},
        BadSpec{"Beta2", [](OptimizerSpec& s) { s.groups[0].beta2 = -0.1; }, "beta2"},
        BadSpec{"Eps", [](OptimizerSpec& s) { s.groups[0].eps = 0; }, "eps"},
        BadSpec{"WeightDecay", [](OptimizerSpec& s) { s.groups[0].weight_decay = -1; }, "weight_decay"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace superoffload::engine
