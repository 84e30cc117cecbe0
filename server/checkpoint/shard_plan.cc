#include "server/checkpoint/shard_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

// What a parameter has of the arrays of one name.
struct NamedTensor {
  uint32_t parameter;
  size_t array;  // of its format
  uint64_t bytes;
};

const std::vector<engine::ArrayLayout>& ArraysOf(const engine::Layout& layout, size_t parameter) {
  return layout.FormatOf(layout.placements[parameter]).arrays;
}

// Of all formats, each once.
std::vector<std::string_view> ArrayNames(const engine::Layout& layout) {
  std::vector<std::string_view> names;
  for (const engine::StateFormat& format : layout.formats) {
    for (const engine::ArrayLayout& array : format.arrays) {
      if (std::ranges::find(names, array.array.name) == names.end()) names.push_back(array.array.name);
    }
  }
  return names;
}

std::vector<NamedTensor> TensorsOf(std::string_view name, const engine::OptimizerSpec& spec,
                                   const engine::Layout& layout) {
  std::vector<NamedTensor> tensors;
  for (uint32_t i = 0; i < spec.parameters.size(); ++i) {
    const std::vector<engine::ArrayLayout>& arrays = ArraysOf(layout, i);
    for (size_t a = 0; a < arrays.size(); ++a) {
      if (arrays[a].array.name != name) continue;
      tensors.push_back({i, a, arrays[a].array.Bytes(engine::ElementCount(spec.parameters[i]))});
    }
  }
  return tensors;
}

// Ranges of tensors that share a file.
std::vector<std::vector<uint32_t>> Split(const std::vector<NamedTensor>& tensors, uint64_t shard_bytes) {
  std::vector<std::vector<uint32_t>> ranges(1);
  uint64_t filled = 0;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (!ranges.back().empty() && filled + tensors[i].bytes > shard_bytes) {
      ranges.emplace_back();
      filled = 0;
    }
    ranges.back().push_back(i);
    filled += tensors[i].bytes;
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
  plan.places.resize(spec.parameters.size());
  for (size_t i = 0; i < plan.places.size(); ++i) plan.places[i].resize(ArraysOf(layout, i).size());
  for (const std::string_view name : ArrayNames(layout)) {
    const std::vector<NamedTensor> tensors = TensorsOf(name, spec, layout);
    const std::vector<std::vector<uint32_t>> ranges = Split(tensors, shard_bytes);
    for (size_t range = 0; range < ranges.size(); ++range) {
      SafetensorsHeader header{.tensors = {}, .metadata = metadata};
      uint64_t end = 0;
      for (const uint32_t i : ranges[range]) {
        const NamedTensor& tensor = tensors[i];
        const engine::ParameterSpec& parameter = spec.parameters[tensor.parameter];
        const kernels::StateArray& array = ArraysOf(layout, tensor.parameter)[tensor.array].array;
        header.tensors.push_back({TensorName(array, parameter.name), SafetensorsDType(array.dtype),
                                  TensorShape(array, parameter), end, end + tensor.bytes});
        plan.places[tensor.parameter][tensor.array] = {static_cast<uint32_t>(plan.shards.size()), end};
        end += tensor.bytes;
      }
      Shard shard{absl::StrFormat("%s-%05d-of-%05d.safetensors", name, range + 1, ranges.size()),
                  EncodeSafetensorsHeader(header), 0};
      shard.bytes = shard.header.size() + end;
      for (const uint32_t i : ranges[range]) {
        plan.places[tensors[i].parameter][tensors[i].array].offset += shard.header.size();
      }
      plan.shards.push_back(std::move(shard));
    }
  }
  return plan;
}

}  // namespace superoffload::checkpoint
