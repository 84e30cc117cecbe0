#include "server/simulator/model_layout.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "kernels/base/check.h"

namespace superoffload::simulator {
namespace {

// First row and number of rows of a tensor that a rank has; torch.chunk's.
std::pair<uint64_t, uint64_t> RowsOf(uint64_t rows, uint32_t rank, uint32_t ranks) {
  const uint64_t each = (rows + ranks - 1) / ranks;
  const uint64_t first = std::min(rows, each * rank);
  return {first, std::min(rows, first + each) - first};
}

std::vector<engine::ParameterSpec> ShardsOf(const std::vector<engine::ParameterSpec>& parameters, uint32_t rank,
                                            uint32_t ranks) {
  std::vector<engine::ParameterSpec> shards;
  for (engine::ParameterSpec parameter : parameters) {
    if (parameter.shape.empty()) parameter.shape = {1};
    const auto [first, rows] = RowsOf(parameter.shape[0], rank, ranks);
    if (rows == 0) continue;
    parameter.global_shape = parameter.shape;
    parameter.global_offset.assign(parameter.shape.size(), 0);
    parameter.global_offset[0] = first;
    parameter.shape[0] = rows;
    shards.push_back(std::move(parameter));
  }
  return shards;
}

// As the PyTorch adapter has it (parameters.py): blocks of which one is too small for a bucket of its own count as one.
void JoinSmallUnits(std::vector<engine::ParameterSpec>& parameters) {
  if (!HasSmallBlocks(parameters)) return;
  for (engine::ParameterSpec& parameter : parameters) parameter.unit = 0;
}

}  // namespace

bool HasSmallBlocks(const std::vector<engine::ParameterSpec>& parameters) {
  std::map<uint32_t, uint64_t> bytes;
  for (const engine::ParameterSpec& parameter : parameters) {
    bytes[parameter.unit] += engine::ElementCount(parameter) * kernels::DTypeBytes(parameter.dtype);
  }
  std::vector<uint64_t> blocks;
  for (const auto& [unit, size] : bytes) {
    if (unit != 0 && unit != bytes.rbegin()->first) blocks.push_back(size);
  }
  return blocks.empty() || *std::ranges::min_element(blocks) < engine::kTaperBytes;
}

void KeepSomeInFp32(const kernels::Algorithm& algorithm, std::vector<engine::ParameterSpec>& parameters) {
  constexpr uint64_t kLeast8BitElements = 4096;
  const bool some = algorithm.block_elements > 1 && algorithm.in_fp32 != nullptr;
  for (engine::ParameterSpec& parameter : parameters) {
    parameter.in_fp32 = some && (parameter.shape.size() < 2 || engine::ElementCount(parameter) < kLeast8BitElements ||
                                 absl::StrContains(parameter.name, "embed"));
  }
}

engine::OptimizerSpec ShardOf(const engine::OptimizerSpec& spec, uint32_t rank, uint32_t ranks) {
  engine::OptimizerSpec shard = spec;
  if (ranks > 1) {
    shard.member = {"plan", rank, ranks};
    shard.parameters = ShardsOf(spec.parameters, rank, ranks);
  }
  JoinSmallUnits(shard.parameters);
  return shard;
}

engine::Layout LayoutOf(const Model& model, engine::OptimizerSpec spec, uint32_t ranks) {
  spec.groups = {spec.algorithm->DefaultScalars()};
  spec.parameters = model.parameters;
  absl::StatusOr<engine::Layout> layout = engine::PlanLayout(ShardOf(spec, 0, ranks));
  SUPEROFFLOAD_CHECK(layout.ok(), "the model must be valid");
  return *std::move(layout);
}

std::vector<BucketUse> BucketUses(const Model& model, const engine::Layout& layout) {
  const std::vector<engine::ParameterSpec>& parameters = model.parameters;
  std::vector<double> complete_at(parameters.size());
  std::vector<double> elements(model.architecture.head_unit() + 1);
  for (size_t i = parameters.size(); i-- > 0;) {
    complete_at[i] = elements[parameters[i].unit] += static_cast<double>(engine::ElementCount(parameters[i]));
  }
  std::vector<BucketUse> uses(layout.buckets.size());
  for (size_t i = 0; i < uses.size(); ++i) {
    BucketUse& use = uses[i];
    const std::span<const engine::Part> parts = layout.PartsOf(layout.buckets[i]);
    for (const engine::Part& part : parts) use.units.push_back(parameters[part.parameter].unit);
    std::sort(use.units.begin(), use.units.end());
    use.units.erase(std::unique(use.units.begin(), use.units.end()), use.units.end());
    const size_t last_unit = use.units.front();
    use.complete_at = 0;
    for (const engine::Part& part : parts) {
      if (parameters[part.parameter].unit != last_unit) continue;
      use.complete_at = std::max(use.complete_at, complete_at[part.parameter] / elements[last_unit]);
    }
  }
  return uses;
}

std::vector<uint32_t> StreamedUnits(const Architecture& architecture, const std::vector<BucketUse>& uses,
                                    double share) {
  std::vector<uint32_t> units;
  for (const BucketUse& use : uses) {
    const auto unit = static_cast<uint32_t>(use.units.front());
    const bool block = use.units.size() == 1 && unit > 0 && unit < architecture.head_unit();
    const bool chosen = block && std::ceil(unit * share) > std::ceil((unit - 1) * share);
    units.push_back(chosen ? unit : 0);
  }
  return units;
}

std::vector<std::vector<uint32_t>> BucketsOfUnits(const std::vector<BucketUse>& uses, size_t units) {
  std::vector<std::vector<uint32_t>> buckets(units);
  for (uint32_t i = 0; i < uses.size(); ++i) {
    for (const size_t unit : uses[i].units) buckets[unit].push_back(i);
  }
  return buckets;
}

}  // namespace superoffload::simulator
