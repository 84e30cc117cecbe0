#include "server/engine/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/algorithm_kinds.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::engine {
namespace {

using kernels::DType;
using ::testing::HasSubstr;

OptimizerSpec OneGroup(std::vector<std::vector<uint64_t>> shapes) {
  OptimizerSpec spec;
  spec.groups = {spec.algorithm->DefaultScalars()};
  for (size_t i = 0; i < shapes.size(); ++i) {
    spec.parameters.push_back({.name = "p" + std::to_string(i), .shape = shapes[i]});
  }
  return spec;
}

TEST(LayoutTest, TheLastRegisteredParameterComesFirst) {
  const absl::StatusOr<Layout> layout = PlanLayout(OneGroup({{64}, {128}, {64}}));
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->placements[2].state_offset, 0u);
  EXPECT_EQ(layout->placements[1].state_offset, 128u);
  EXPECT_EQ(layout->placements[0].state_offset, 256u);
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

TEST(LayoutTest, UnitsNeverShareABucket) {
  OptimizerSpec spec = OneGroup({{64}, {64}, {64}, {64}});
  spec.parameters[0].unit = spec.parameters[1].unit = 1;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->buckets.size(), 2u);
  EXPECT_EQ(layout->placements[1].first_bucket, 1u);
  EXPECT_EQ(layout->placements[2].first_bucket, 0u);
}

// Of two groups, and a parameter that is larger than a bucket.
TEST(LayoutTest, TheParameterMemoryHoldsEachUnitInOnePiece) {
  OptimizerSpec spec = OneGroup({{64}, {64}, {300, 100}, {64}, {64}, {64}});
  spec.groups.assign(2, spec.algorithm->DefaultScalars());
  spec.bucket_bytes = kMinBucketBytes;
  for (uint32_t i = 0; i < 6; ++i) {
    spec.parameters[i].unit = i / 2;
    spec.parameters[i].group = i % 2;
  }
  const auto units = [&spec](uint32_t version) {
    spec.layout_version = version;
    const Layout layout = *PlanLayout(spec);
    std::map<uint64_t, uint32_t> by_offset;
    for (const BucketLayout& bucket : layout.buckets) by_offset[bucket.parameters_offset] = bucket.unit;
    for (size_t i = 0; i < spec.parameters.size(); ++i) {
      for (uint32_t b = 0; b < layout.placements[i].bucket_count; ++b) {
        const BucketLayout& bucket = layout.buckets[layout.placements[i].first_bucket + b];
        EXPECT_EQ(bucket.unit, spec.parameters[i].unit);
        EXPECT_EQ(bucket.parameters_offset - layout.placements[i].parameters_offset,
                  2 * (bucket.state_offset - layout.placements[i].state_offset))
            << "a parameter's memory is contiguous";
      }
    }
    std::vector<uint32_t> order;
    for (const auto& [offset, unit] : by_offset) {
      if (order.empty() || order.back() != unit) order.push_back(unit);
    }
    return order;
  };
  EXPECT_EQ(units(kLayoutVersion), (std::vector<uint32_t>{2, 1, 0}));
  EXPECT_EQ(units(4), (std::vector<uint32_t>{2, 1, 0, 2, 1, 0})) << "by group";
}

TEST(LayoutTest, PartsTellWhatABucketHoldsOfEachParameter) {
  OptimizerSpec spec = OneGroup({{10}, {10, 1000}, {100}});
  spec.bucket_bytes = 4096;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::vector<uint64_t> elements(spec.parameters.size());
  for (const BucketLayout& bucket : layout->buckets) {
    uint64_t sum = 0;
    for (const Part& part : layout->PartsOf(bucket)) {
      sum += part.elements;
      elements[part.parameter] += part.elements;
    }
    EXPECT_EQ(sum, bucket.elements);
  }
  EXPECT_EQ(elements, (std::vector<uint64_t>{128, 10112, 128}));
}

TEST(LayoutTest, ParametersInPlaceLieWhereTheirGradientsDo) {
  OptimizerSpec spec = OneGroup({{2048}, {100, 30}, {7}});
  spec.bucket_bytes = 4096;
  const Layout copied = *PlanLayout(spec);
  spec.gradient_slots = 1;
  spec.in_place = true;
  const Layout layout = *PlanLayout(spec);
  EXPECT_TRUE(layout.in_place && layout.has_one_slot);
  EXPECT_FALSE(copied.in_place);
  EXPECT_EQ(layout.parameters_bytes, copied.parameters_bytes);
  EXPECT_EQ(layout.gradients_bytes, layout.parameters_bytes);
  EXPECT_EQ(layout.state_bytes, copied.state_bytes);
  for (const BucketLayout& bucket : layout.buckets) {
    EXPECT_EQ(bucket.GradientOffset(0), bucket.parameters_offset);
    EXPECT_EQ(bucket.GradientOffset(1), bucket.parameters_offset);
  }
  for (const Placement& placement : layout.placements) {
    for (const uint64_t offset : placement.gradient_offsets) EXPECT_EQ(offset, placement.parameters_offset);
  }
}

TEST(LayoutTest, WhatCannotBeInPlaceIsRefused) {
  const auto why = [](const OptimizerSpec& spec) { return std::string(PlanLayout(spec).status().message()); };
  OptimizerSpec spec = OneGroup({{2048}, {64, 64}});
  spec.gradient_slots = 1;
  spec.in_place = true;
  EXPECT_EQ(why(spec), "");
  OptimizerSpec other = spec;
  other.gradient_slots = 2;
  EXPECT_THAT(why(other), HasSubstr("in_place needs one gradient slot"));
  other.gradient_slots = 3;
  EXPECT_THAT(why(other), HasSubstr("gradient_slots is 3 but must be 1 or 2"));
  other = spec;
  other.logged_buckets = 1;
  other.log_slots = 3;
  EXPECT_THAT(why(other), HasSubstr("and no logs"));
  other = spec;
  other.parameters[1].gradient_dtype = DType::kFloat32;
  EXPECT_THAT(why(other), HasSubstr("have another dtype than the parameter"));
  other = spec;
  for (const kernels::Algorithm* kind : test::EveryKindOfAlgorithm()) {
    if (kind->stages != nullptr) other.algorithm = kind;
  }
  other.groups = {other.algorithm->DefaultScalars()};
  EXPECT_THAT(why(other), HasSubstr("an algorithm that updates elements"));
}

TEST(LayoutTest, ALogHasTheTwoSlotsAndMoreBehindAllOthers) {
  OptimizerSpec spec = OneGroup({{2048}, {2048}, {2048}});
  spec.bucket_bytes = 4096;
  const Layout without = *PlanLayout(spec);
  spec.logged_buckets = 2;
  spec.log_slots = 4;
  const Layout layout = *PlanLayout(spec);
  ASSERT_EQ(layout.buckets.size(), 3u);
  EXPECT_EQ(layout.buckets[0].log_slots, 0u);
  std::set<uint64_t> offsets;
  for (uint32_t i = 1; i < 3; ++i) {
    const BucketLayout& bucket = layout.buckets[i];
    EXPECT_EQ(bucket.log_slots, 4u);
    EXPECT_EQ(bucket.gradient_offsets, without.buckets[i].gradient_offsets);
    for (uint32_t slot = 0; slot < 2; ++slot) EXPECT_EQ(bucket.GradientOffset(slot), bucket.gradient_offsets[slot]);
    for (uint32_t slot = 2; slot < 4; ++slot) offsets.insert(bucket.GradientOffset(slot));
    EXPECT_EQ(bucket.GradientSlot(6, /*logged=*/true), 1u);
    EXPECT_EQ(bucket.GradientSlot(7, /*logged=*/true), 2u);
    EXPECT_EQ(bucket.GradientSlot(7, /*logged=*/false), 0u);
  }
  const uint64_t first = without.gradients_bytes;
  EXPECT_EQ(offsets, (std::set<uint64_t>{first, first + 4096, first + 8192, first + 12288}));
  EXPECT_EQ(layout.gradients_bytes, first + 16384);
  EXPECT_EQ(layout.logs_bytes, 16384u);
  EXPECT_EQ(layout.kept_steps, 4u);
  for (const uint32_t slots : {0u, 1u, 33u}) {
    spec.log_slots = slots;
    EXPECT_THAT(std::string(PlanLayout(spec).status().message()), HasSubstr("log_slots is ")) << slots;
  }
  spec.log_slots = 4;
  for (const kernels::Algorithm* kind : test::EveryKindOfAlgorithm()) {
    if (kind->stages != nullptr) spec.algorithm = kind;
  }
  spec.groups = {spec.algorithm->DefaultScalars()};
  EXPECT_THAT(std::string(PlanLayout(spec).status().message()), HasSubstr("none can be resident"));
}

std::vector<double> GradientMiB(const Layout& layout) {
  std::vector<double> sizes;
  for (const BucketLayout& bucket : layout.buckets) {
    sizes.push_back(static_cast<double>(bucket.gradient_bytes()) / (1 << 20));
  }
  return sizes;
}

constexpr uint64_t kMiBElements = (1 << 20) / 2;  // of bfloat16

TEST(LayoutTest, BucketsTaperTowardTheParametersThatBackwardReachesLast) {
  const absl::StatusOr<Layout> many = PlanLayout(OneGroup(std::vector<std::vector<uint64_t>>(75, {4, kMiBElements})));
  ASSERT_TRUE(many.ok()) << many.status();
  EXPECT_EQ(GradientMiB(*many), (std::vector<double>{64, 64, 64, 52, 28, 12, 8, 4, 4}));
  const absl::StatusOr<Layout> one = PlanLayout(OneGroup({{300, kMiBElements}}));
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(GradientMiB(*one), (std::vector<double>{64, 64, 64, 54, 27, 13.5, 6.75, 4, 2.75}));
}

TEST(LayoutTest, OnlyTheModelsFirstParametersTaper) {
  OptimizerSpec spec = OneGroup({{4, kMiBElements}, {64, kMiBElements}, {128, kMiBElements}});
  spec.groups.assign(2, spec.algorithm->DefaultScalars());
  spec.parameters[2].group = 1;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(GradientMiB(*layout), (std::vector<double>{64, 64, 34, 17, 8.5, 4.25, 0.25, 4}));
}

TEST(LayoutTest, BucketsNoLargerThanTheLastOnesDoNotTaper) {
  OptimizerSpec spec = OneGroup({{10, kMiBElements}});
  spec.bucket_bytes = 3 << 20;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(GradientMiB(*layout), (std::vector<double>{3, 3, 3, 1}));
}

TEST(LayoutTest, EveryParameterStartsWhereCublasLtAsksNoQuestions) {
  OptimizerSpec spec = OneGroup({{3}, {65}, {129}, {1}, {127, 3}});
  spec.parameters[1].dtype = spec.parameters[3].dtype = DType::kFloat32;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  for (const Placement& placement : layout->placements) EXPECT_EQ(placement.parameters_offset % 256, 0u);
}

// Records of that version lie in the memory of running daemons.
TEST(LayoutTest, TheLayoutOfVersionThreeStaysWhatItIs) {
  OptimizerSpec spec = OneGroup({{4, kMiBElements}, {100, kMiBElements}, {10}, {100}});
  spec.layout_version = 3;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->version, 3u);
  const auto state_offset = [&layout](size_t parameter) { return layout->placements[parameter].state_offset; };
  EXPECT_EQ(state_offset(3), 0u);
  EXPECT_EQ(state_offset(2), 128u);
  EXPECT_EQ(state_offset(1), 192u);
  EXPECT_EQ(state_offset(0), 192 + 100 * kMiBElements);
  std::vector<uint64_t> elements;
  for (const BucketLayout& bucket : layout->buckets) elements.push_back(bucket.elements);
  EXPECT_EQ(elements, (std::vector<uint64_t>{192, 64 * kMiBElements, 40 * kMiBElements}));
}

TEST(LayoutTest, AnUnknownVersionIsRefused) {
  for (const uint32_t version : {kOldestLayoutVersion - 1, kLayoutVersion + 1}) {
    OptimizerSpec spec = OneGroup({{64}});
    spec.layout_version = version;
    EXPECT_THAT(std::string(PlanLayout(spec).status().message()), HasSubstr("layout_version"));
  }
}

// Of every parameter, after steps of which some are clipped.
std::vector<float> TrainedMasters(OptimizerSpec spec) {
  const Layout layout = *PlanLayout(spec);
  test::Memory memory(layout);
  test::SequentialOptimizer optimizer(layout, memory.view(), spec.groups);
  std::minstd_rand random(1);
  for (int step = 1; step <= 6; ++step) {
    for (size_t i = 0; i < spec.parameters.size(); ++i) {
      for (uint64_t j = 0; j < ElementCount(spec.parameters[i]); ++j) {
        const float value = static_cast<float>(random() % 2001) / 1000 - 1;
        test::StoreElement(memory.gradients.data() + layout.placements[i].gradient_offsets[0], j,
                           spec.parameters[i].gradient_dtype, value);
      }
    }
    EXPECT_EQ(optimizer.Step(memory.gradients.data(), 0, 1, step % 2 == 0 ? 0.7 : 0),
              step % 2 == 0 ? Verdict::kClip : Verdict::kCommit);
  }
  std::vector<float> masters;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const auto* const first = reinterpret_cast<const float*>(
        optimizer.memory().state.data() + layout.formats[0].Byte(0, layout.placements[i].state_offset));
    masters.insert(masters.end(), first, first + ElementCount(spec.parameters[i]));
  }
  return masters;
}

TEST(LayoutTest, WeightsAreThoseOfAnyOtherLayout) {
  OptimizerSpec spec = OneGroup({{37, 19}, {37}, {70000}, {}, {300, 700}});
  const std::vector<float> expected = TrainedMasters(spec);
  for (const uint64_t bucket_bytes : {kMinBucketBytes, uint64_t{1} << 18, uint64_t{0}}) {
    for (const uint32_t version : {kOldestLayoutVersion, kLayoutVersion}) {
      spec.bucket_bytes = bucket_bytes;
      spec.layout_version = version;
      EXPECT_EQ(TrainedMasters(spec), expected) << "version " << version << " with buckets of " << bucket_bytes;
    }
  }
}

// An algorithm whose second array is of a narrower dtype.
TEST(LayoutTest, EveryStateArrayHasItsOwnDtype) {
  constexpr kernels::StateArray kArrays[] = {{"model"}, {"momentum", DType::kBFloat16}, {"count"}};
  kernels::Algorithm algorithm = *kernels::Algorithms().front();
  algorithm.arrays = kArrays;
  OptimizerSpec spec = OneGroup({{5000}, {77}});
  spec.algorithm = &algorithm;
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->formats[0].arrays.size(), 3u);
  EXPECT_GE(layout->formats[0].arrays[1].offset, layout->formats[0].Byte(0, layout->state_elements()));
  EXPECT_GE(layout->formats[0].arrays[2].offset, layout->formats[0].Byte(1, layout->state_elements()));
  EXPECT_EQ(layout->formats[0].Byte(1, 10) - layout->formats[0].Byte(1, 0), 20u);
  EXPECT_GE(layout->state_bytes, layout->formats[0].Byte(2, layout->state_elements()));
}

// However a range begins, what it is rounded with is counted from each parameter's own first element.
TEST(LayoutTest, ParametersAreRoundedByTheirOwnElements) {
  OptimizerSpec spec = OneGroup({{5000}, {300}, {77, 10}});
  spec.algorithm = kernels::FindAlgorithm("adamw_bf16");
  spec.parameters[2].global_shape = {77, 40};
  spec.parameters[2].global_offset = {0, 20};
  const absl::StatusOr<Layout> layout = PlanLayout(spec);
  ASSERT_TRUE(layout.ok()) << layout.status();
  for (uint32_t i = 0; i < 3; ++i) {
    const uint64_t first = layout->placements[i].state_offset;
    for (const uint64_t before : {uint64_t{0}, first}) {
      const kernels::Rounding rounding = layout->RoundingOf(i, first - before, 7);
      EXPECT_EQ(rounding.key, kernels::RoundingKey(7, kernels::RoundingHash(spec.parameters[i].name)));
      EXPECT_EQ(rounding.box->Find(rounding.first + before + 25).element, i == 2 ? 2 * 40 + 20 + 5 : 25u);
    }
  }
  EXPECT_TRUE(PlanLayout(OneGroup({{5000}}))->roundings.empty());
}

TEST(LayoutTest, GroupsAndDtypesNeverShareABucket) {
  OptimizerSpec spec = OneGroup({{64}, {64}, {64}, {64}});
  spec.groups.assign(2, spec.algorithm->DefaultScalars());
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
    spec.groups.assign(1 + random() % 3, spec.algorithm->DefaultScalars());
    spec.layout_version = kOldestLayoutVersion + random() % (kLayoutVersion - kOldestLayoutVersion + 1);
    spec.bucket_bytes = kMinBucketBytes << (random() % 5);
    const size_t count = 1 + random() % 40;
    for (size_t i = 0; i < count; ++i) {
      spec.parameters.push_back({.name = std::to_string(i),
                                 .shape = {1 + random() % 100, 1 + random() % 100},
                                 .dtype = static_cast<DType>(random() % 3),
                                 .gradient_dtype = static_cast<DType>(random() % 3),
                                 .group = static_cast<uint32_t>(random() % spec.groups.size()),
                                 .unit = static_cast<uint32_t>(random() % 3)});
    }
    const absl::StatusOr<Layout> layout = PlanLayout(spec);
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::vector<char> parameters(layout->parameters_bytes), gradients(layout->gradients_bytes);
    std::vector<char> state(layout->state_elements());
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
        BadSpec{"NarrowMastersOfWiderParameters",
                [](OptimizerSpec& s) {
                  s.algorithm = kernels::FindAlgorithm("adamw_bf16_masters");
                  s.parameters[0].dtype = DType::kBFloat16;
                  s.parameters[1].dtype = DType::kFloat16;
                },
                "parameters[1] (\"p1\"): adamw_bf16_masters has master weights in bf16, but the parameter has another "
                "dtype; set "
                "state_in_float32 for it, or cast it to bf16"},
        BadSpec{"ShapeOverflow",
                [](OptimizerSpec& s) { s.parameters[0].shape = {uint64_t{1} << 63, uint64_t{1} << 63}; }, "shape"},
        BadSpec{"TooManyDimensions", [](OptimizerSpec& s) { s.parameters[1].shape.assign(65, 1); }, "65 dimensions"},
        BadSpec{"ShardOfTooManyDimensions",
                [](OptimizerSpec& s) {
                  s.parameters[1].global_shape.assign(1000, 64);
                  s.parameters[1].global_offset.assign(1000, 0);
                },
                "global_shape has 1000 dimensions"},
        BadSpec{"CutTooOftenForStochasticRounding",
                [](OptimizerSpec& s) {
                  s.algorithm = kernels::FindAlgorithm("adamw_bf16");
                  s.parameters[1].shape.assign(16, 2);
                  s.parameters[1].global_shape.assign(16, 3);
                  s.parameters[1].global_offset.assign(16, 1);
                },
                "is cut in more than 7 dimensions"},
        BadSpec{"TooManyElements", [](OptimizerSpec& s) { s.parameters[0].shape = {uint64_t{1} << 40}; }, "2^40"},
        BadSpec{"SmallBucket", [](OptimizerSpec& s) { s.bucket_bytes = 1; }, "bucket_bytes"},
        BadSpec{"TooManyBuckets",
                [](OptimizerSpec& s) {
                  s.parameters[0].shape = {uint64_t{1} << 36};
                  s.bucket_bytes = kMinBucketBytes;
                },
                "too many buckets"},
        BadSpec{"NegativeRate", [](OptimizerSpec& s) { s.groups[0][0] = -1; }, "lr"},
        BadSpec{"NanRate", [](OptimizerSpec& s) { s.groups[0][0] = std::numeric_limits<double>::quiet_NaN(); }, "lr"},
        BadSpec{"Beta1", [](OptimizerSpec& s) { s.groups[0][1] = 1; }, "beta1"},
        BadSpec{"Beta2", [](OptimizerSpec& s) { s.groups[0][2] = -0.1; }, "beta2"},
        BadSpec{"Eps", [](OptimizerSpec& s) { s.groups[0][3] = -1e-8; }, "eps"},
        BadSpec{"WeightDecay", [](OptimizerSpec& s) { s.groups[0][4] = -1; }, "weight_decay"},
        BadSpec{"MissingScalar", [](OptimizerSpec& s) { s.groups[0].pop_back(); }, "has 5"},
        BadSpec{"ShardOfOtherDimensions", [](OptimizerSpec& s) { s.parameters[0].global_shape = {8, 8}; }, "shard"},
        BadSpec{"ShardBeyondItsTensor",
                [](OptimizerSpec& s) {
                  s.parameters[0].global_shape = s.parameters[0].shape;
                  s.parameters[0].global_offset.assign(s.parameters[0].shape.size(), 1);
                },
                "shard"},
        BadSpec{"RankOfNoRun", [](OptimizerSpec& s) { s.member = {"", 0, 2}; }, "run's name"},
        BadSpec{"RankBeyondTheLast", [](OptimizerSpec& s) { s.member = {"llama", 2, 2}; }, "rank 2 of 2"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace superoffload::engine
