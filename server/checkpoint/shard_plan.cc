#include "server/checkpoint/shard_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

// Ranges of parameters whose tensors share a file.
std::vector<std::vector<uint32_t>> Split(const std::vector<uint64_t>& bytes, uint64_t shard_bytes) {
  std::vector<std::vector<uint32_t>> ranges(1);
  uint64_t filled = 0;
  for (uint32_t i = 0; i < bytes.size(); ++i) {
    if (!ranges.back().empty() && filled + bytes[i] > shard_bytes) {
      ranges.emplace_back();
      filled = 0;
    }
    ranges.back().push_back(i);
    filled += bytes[i];
  }
  return ranges;
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

// Of what has an entry per element: that of the parameter.
std::vector<uint64_t> TensorShape(const kernels::StateArray& array, const engine::ParameterSpec& parameter) {
  if (array.elements_per_entry == 1) return parameter.shape;
  return {array.Entries(engine::ElementCount(parameter))};
}

}  // namespace

std::string TensorName(const kernels::StateArray& array, const std::string& parameter) {
  return absl::StrCat(std::string(array.name), ".", parameter);
}

const char* SafetensorsDType(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kBFloat16:
      return "BF16";
    case kernels::DType::kFloat16:
      return "F16";
    case kernels::DType::kFloat32:
      return "F32";
    case kernels::DType::kUInt8:
      break;
  }
  return "U8";
}

ShardPlan PlanShards(const engine::OptimizerSpec& spec, const engine::Layout& layout,
                     const std::map<std::string, std::string>& metadata, uint64_t shard_bytes) {
  ShardPlan plan;
  plan.bucket_pieces = SplitByBucket(spec, layout);
  plan.places.resize(spec.algorithm->arrays.size());
  for (size_t a = 0; a < plan.places.size(); ++a) {
    const kernels::StateArray& array = spec.algorithm->arrays[a];
    std::vector<uint64_t> bytes;
    for (const engine::ParameterSpec& parameter : spec.parameters) {
      bytes.push_back(array.Bytes(engine::ElementCount(parameter)));
    }
    const std::vector<std::vector<uint32_t>> ranges = Split(bytes, shard_bytes);
    plan.places[a].resize(bytes.size());
    for (size_t range = 0; range < ranges.size(); ++range) {
      SafetensorsHeader header{.tensors = {}, .metadata = metadata};
      uint64_t end = 0;
      for (const uint32_t i : ranges[range]) {
        const engine::ParameterSpec& parameter = spec.parameters[i];
        header.tensors.push_back({TensorName(array, parameter.name), SafetensorsDType(array.dtype),
                                  TensorShape(array, parameter), end, end + bytes[i]});
        plan.places[a][i] = {static_cast<uint32_t>(plan.shards.size()), end};
        end += bytes[i];
      }
      Shard shard{absl::StrFormat("%s-%05d-of-%05d.safetensors", std::string(array.name), range + 1, ranges.size()),
                  EncodeSafetensorsHeader(header), 0};
      shard.bytes = shard.header.size() + end;
      for (const uint32_t i : ranges[range]) plan.places[a][i].offset += shard.header.size();
      plan.shards.push_back(std::move(shard));
    }
  }
  return plan;
}

}  // namespace superoffload::checkpoint
