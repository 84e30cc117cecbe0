#include "server/checkpoint/shard_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

// Runs of parameters whose tensors share a file.
std::vector<std::vector<uint32_t>> Split(const std::vector<uint64_t>& bytes, uint64_t shard_bytes) {
  std::vector<std::vector<uint32_t>> runs(1);
  uint64_t filled = 0;
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (!runs.back().empty() && filled + bytes[i] > shard_bytes) {
      runs.emplace_back();
      filled = 0;
    }
    runs.back().push_back(i);
    filled += bytes[i];
  }
  return runs;
}

std::vector<std::vector<Piece>> SplitByBucket(const engine::OptimizerSpec& spec, const engine::Layout& layout) {
  std::vector<std::vector<Piece>> pieces(layout.buckets.size());
  for (uint32_t i = 0; i < spec.parameters.size(); ++i) {
    const engine::Placement& place = layout.placements[i];
    const uint64_t begin = place.state_offset, end = begin + engine::ElementCount(spec.parameters[i]);
    for (uint32_t b = place.first_bucket; b < place.first_bucket + place.bucket_count; ++b) {
      const engine::BucketLayout& bucket = layout.buckets[b];
      const uint64_t first = std::max(begin, bucket.state_offset);
      const uint64_t last = std::min(end, bucket.state_offset + bucket.elements);
      if (first < last) pieces[b].push_back({i, first - begin, last - first});
    }
  }
  return pieces;
}

}  // namespace

ShardPlan PlanShards(const engine::OptimizerSpec& spec, const engine::Layout& layout,
                     const std::map<std::string, std::string>& metadata, uint64_t shard_bytes) {
  std::vector<uint64_t> bytes;
  for (const engine::ParameterSpec& parameter : spec.parameters) {
    bytes.push_back(engine::ElementCount(parameter) * sizeof(float));
  }
  const std::vector<std::vector<uint32_t>> runs = Split(bytes, shard_bytes);
  ShardPlan plan;
  plan.bucket_pieces = SplitByBucket(spec, layout);
  for (size_t array = 0; array < kArrays.size(); ++array) {
    plan.places[array].resize(bytes.size());
    for (size_t run = 0; run < runs.size(); ++run) {
      SafetensorsHeader header{.tensors = {}, .metadata = metadata};
      uint64_t end = 0;
      for (const uint32_t i : runs[run]) {
        const engine::ParameterSpec& parameter = spec.parameters[i];
        header.tensors.push_back(
            {absl::StrCat(kArrays[array], ".", parameter.name), "F32", parameter.shape, end, end + bytes[i]});
        plan.places[array][i] = {static_cast<uint32_t>(plan.shards.size()), end};
        end += bytes[i];
      }
      Shard shard{absl::StrFormat("%s-%05d-of-%05d.safetensors", kArrays[array], run + 1, runs.size()),
                  EncodeSafetensorsHeader(header), 0};
      shard.bytes = shard.header.size() + end;
      for (const uint32_t i : runs[run]) plan.places[array][i].offset += shard.header.size();
      plan.shards.push_back(std::move(shard));
    }
  }
  return plan;
}

}  // namespace superoffload::checkpoint
