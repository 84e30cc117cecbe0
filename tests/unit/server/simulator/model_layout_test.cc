#include "server/simulator/model_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

#include "server/simulator/catalogue.h"

namespace superoffload::simulator {
namespace {

using ::testing::ElementsAre;

TEST(ModelLayoutTest, ShardsAreTorchChunks) {
  engine::OptimizerSpec spec;
  spec.parameters.resize(2);
  spec.parameters[0].shape = {33, 8};
  spec.parameters[1].shape = {1};
  const engine::OptimizerSpec last = ShardOf(spec, 1, 2);
  ASSERT_EQ(last.parameters.size(), 1u);
  EXPECT_THAT(last.parameters[0].shape, ElementsAre(16, 8));
  EXPECT_THAT(last.parameters[0].global_offset, ElementsAre(17, 0));
  EXPECT_THAT(last.parameters[0].global_shape, ElementsAre(33, 8));
}

TEST(ModelLayoutTest, TheFirstRankHasSomethingOfEachParameter) {
  const Model model = *FindModel("gpt2-1b");
  const engine::Layout whole = LayoutOf(model), shard = LayoutOf(model, {}, 7);
  uint64_t elements = 0;
  for (const engine::BucketLayout& bucket : shard.buckets) elements += bucket.elements;
  EXPECT_GE(7 * elements, ParameterCount(model));
  EXPECT_LT(shard.buckets.size(), whole.buckets.size());
  const std::vector<BucketUse> uses = BucketUses(model, shard);
  for (const std::vector<uint32_t>& buckets : BucketsOfUnits(uses, model.architecture.head_unit() + 1)) {
    EXPECT_FALSE(buckets.empty());
  }
}

TEST(ModelLayoutTest, ABucketIsCompleteWithItsFirstParameterInItsLastUnit) {
  const Model model = *FindModel("gpt2-1b");
  const std::vector<BucketUse> uses = BucketUses(model, LayoutOf(model));
  double before = 0;
  size_t unit = model.architecture.head_unit();
  for (const BucketUse& use : uses) {
    EXPECT_LE(use.units.front(), unit) << "backward goes down";
    EXPECT_TRUE(use.units.front() != unit || use.complete_at >= before);
    EXPECT_GT(use.complete_at, 0);
    EXPECT_LE(use.complete_at, 1);
    unit = use.units.front();
    before = use.complete_at;
  }
  EXPECT_EQ(unit, 0u);
  EXPECT_EQ(before, 1);
}

TEST(ModelLayoutTest, AShareOfTheBlocksStreamsEvenlyAndNothingElse) {
  const Model model = *FindModel("gpt2-1b");
  const uint32_t blocks = model.architecture.layers;
  const std::vector<BucketUse> uses = BucketUses(model, LayoutOf(model));
  const auto streamed = [&](double share) {
    const std::vector<uint32_t> units = StreamedUnits(model.architecture, uses, share);
    for (size_t i = 0; i < units.size(); ++i) {
      EXPECT_TRUE(units[i] == 0 || uses[i].units == std::vector<size_t>{units[i]}) << "bucket " << i;
    }
    std::set<uint32_t> found(units.begin(), units.end());
    found.erase(0);
    return std::vector<uint32_t>(found.begin(), found.end());
  };
  EXPECT_TRUE(streamed(0).empty());
  std::vector<uint32_t> all(blocks);
  std::iota(all.begin(), all.end(), 1u);
  EXPECT_EQ(streamed(1), all);
  const std::vector<uint32_t> some = streamed(0.25);
  ASSERT_EQ(some.size(), (blocks + 3) / 4);
  for (size_t i = 0; i < some.size(); ++i) EXPECT_EQ(some[i], 1 + 4 * i);
}

}  // namespace
}  // namespace superoffload::simulator
