#include "server/checkpoint/shard_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "server/checkpoint/safetensors.h"
#include "tests/support/algorithm_kinds.h"

namespace superoffload::checkpoint {
namespace {

TEST(ShardPlanTest, EveryElementHasOnePieceAndEveryTensorOnePlace) {
  engine::OptimizerSpec spec;
  spec.algorithm = kernels::FindAlgorithm("adamw_8bit");
  spec.groups.assign(2, spec.algorithm->DefaultScalars());
  spec.bucket_bytes = 4096;
  for (uint32_t i = 0; i < 9; ++i) {
    spec.parameters.push_back({.name = "p" + std::to_string(i), .shape = {i * 700 + 1, 3}, .group = i % 2});
  }
  test::KeepSomeInFp32(spec);
  const engine::Layout layout = *engine::PlanLayout(spec);
  const ShardPlan plan = PlanShards(spec, layout, {{"format", "pt"}}, /*shard_bytes=*/60'000);

  std::vector<uint64_t> covered(spec.parameters.size());
  for (const std::vector<Piece>& pieces : plan.bucket_pieces) {
    for (const Piece& piece : pieces) {
      EXPECT_EQ(piece.first, covered[piece.parameter]) << "buckets of a parameter are in order";
      covered[piece.parameter] += piece.elements;
    }
  }
  for (size_t i = 0; i < covered.size(); ++i) EXPECT_EQ(covered[i], engine::ElementCount(spec.parameters[i]));

  std::set<std::string> names, files;
  for (const Shard& shard : plan.shards) {
    EXPECT_TRUE(files.insert(shard.file).second) << shard.file;
    const absl::StatusOr<SafetensorsHeader> header =
        ParseSafetensorsHeader(shard.header.substr(8), shard.bytes - shard.header.size());
    ASSERT_TRUE(header.ok()) << header.status();
    EXPECT_TRUE(header->tensors.size() == 1 || shard.bytes - shard.header.size() <= 60'000);
    for (const SafetensorsTensor& tensor : header->tensors) EXPECT_TRUE(names.insert(tensor.name).second);
  }
  EXPECT_GT(plan.shards.size(), 5u);
  size_t tensors = 0;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const engine::StateFormat& format = layout.FormatOf(layout.placements[i]);
    ASSERT_EQ(plan.places[i].size(), format.arrays.size());
    tensors += format.arrays.size();
    for (size_t array = 0; array < format.arrays.size(); ++array) {
      const ShardPlan::Place& place = plan.places[i][array];
      const Shard& shard = plan.shards[place.shard];
      const SafetensorsHeader header =
          *ParseSafetensorsHeader(shard.header.substr(8), shard.bytes - shard.header.size());
      const kernels::StateArray& laid_out = format.arrays[array].array;
      const auto found =
          std::ranges::find(header.tensors, TensorName(laid_out, spec.parameters[i].name), &SafetensorsTensor::name);
      ASSERT_NE(found, header.tensors.end());
      EXPECT_EQ(place.offset, shard.header.size() + found->begin);
      EXPECT_EQ(found->end - found->begin, laid_out.Bytes(engine::ElementCount(spec.parameters[i])));
      if (laid_out.elements_per_entry == 1) {
        EXPECT_EQ(found->shape, spec.parameters[i].shape);
      }
    }
  }
  EXPECT_EQ(names.size(), tensors);
  EXPECT_EQ(tensors, 6 * 5 + 3 * 3u);
}

}  // namespace
}  // namespace superoffload::checkpoint
