#include "server/checkpoint/shard_plan.h"

#include <gtest/gtest.h>

#include <set>

#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

TEST(ShardPlanTest, EveryElementHasOnePieceAndEveryTensorOnePlace) {
  engine::OptimizerSpec spec;
  spec.groups.assign(2, spec.algorithm->DefaultScalars());
  spec.bucket_bytes = 4096;
  for (uint32_t i = 0; i < 9; ++i) {
    spec.parameters.push_back({.name = "p" + std::to_string(i), .shape = {i * 700 + 1, 3}, .group = i % 2});
  }
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
  EXPECT_EQ(names.size(), 3 * spec.parameters.size());
  EXPECT_GT(plan.shards.size(), 3u);
  for (size_t array = 0; array < spec.algorithm->arrays.size(); ++array) {
    const ShardPlan::Place& place = plan.places[array][4];
    const Shard& shard = plan.shards[place.shard];
    const SafetensorsHeader header = *ParseSafetensorsHeader(shard.header.substr(8), shard.bytes - shard.header.size());
    bool found = false;
    for (const SafetensorsTensor& tensor : header.tensors) {
      if (tensor.name != TensorName(spec.algorithm->arrays[array], "p4")) continue;
      found = true;
      EXPECT_EQ(place.offset, shard.header.size() + tensor.begin);
      EXPECT_EQ(tensor.shape, spec.parameters[4].shape);
    }
    EXPECT_TRUE(found);
  }
}

}  // namespace
}  // namespace superoffload::checkpoint
