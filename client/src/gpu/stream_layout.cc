#include "client/src/gpu/stream_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "client/src/core/model_layout.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {

using kernels::WholeGranules;

namespace {

// Buckets of one unit, or of none, that lie one behind the other.
struct Run {
  uint32_t unit = 0;
  uint64_t begin = 0, end = 0;
  std::vector<uint32_t> buckets;

  uint64_t pages() const { return WholePages(begin % WholePages(1) + end - begin); }  // in bytes
};

Status ToGpuBucket(const superoffload_bucket& given, GpuBucket* bucket) {
  *bucket = {.elements = given.elements, .gpu_offset = given.gpu_offset, .unit = given.unit};
  if (ToDType(given.dtype, &bucket->dtype) && ToDType(given.gradient_dtype, &bucket->gradient_dtype)) return {};
  return Error(Code::kInvalidArgument, "a bucket has the unknown dtype ", given.dtype, " or ", given.gradient_dtype);
}

std::vector<Run> FindRuns(const std::vector<GpuBucket>& buckets) {
  std::vector<uint32_t> order(buckets.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, {}, [&](uint32_t bucket) { return buckets[bucket].gpu_offset; });
  std::vector<Run> runs;
  for (const uint32_t bucket : order) {
    const GpuBucket& given = buckets[bucket];
    if (runs.empty() || runs.back().unit != given.unit) runs.push_back({given.unit, given.gpu_offset, 0, {}});
    runs.back().end = given.gpu_offset + given.parameters_bytes();
    runs.back().buckets.push_back(bucket);
  }
  return runs;
}

// Where in a page a run begins stays as it is, and so does how tensors are aligned. Returns what it takes.
uint64_t Move(const Run& run, uint64_t page, const std::vector<GpuBucket>& buckets, std::span<uint64_t> gpu_offsets) {
  const uint64_t begin = page + run.begin % WholePages(1);
  for (const uint32_t bucket : run.buckets) gpu_offsets[bucket] = begin + buckets[bucket].gpu_offset - run.begin;
  return run.pages();
}

}  // namespace

Status LayOutStreams(std::span<const superoffload_bucket> given, uint32_t slots, std::span<uint64_t> gpu_offsets,
                     uint64_t* bytes) {
  std::vector<GpuBucket> buckets(given.size());
  for (size_t i = 0; i < given.size(); ++i) {
    if (Status status = ToGpuBucket(given[i], &buckets[i]); !status.ok()) return status;
  }
  const std::vector<Run> runs = FindRuns(buckets);
  std::map<uint32_t, const Run*> of_unit;
  uint64_t end = 0, unit_bytes = 0;
  for (const Run& run : runs) {
    if (run.unit == 0) {
      end += Move(run, end, buckets, gpu_offsets);
    } else if (!of_unit.emplace(run.unit, &run).second) {
      return Error(Code::kInvalidArgument, "the buckets of unit ", run.unit,
                   " do not lie beside each other; create the optimizer with Parameter.unit, and use the layout of "
                   "the attach response");
    } else {
      unit_bytes = std::max(unit_bytes, WholeGranules(run.pages()));
    }
  }
  if (!of_unit.empty() && slots == 0) {
    return Error(Code::kInvalidArgument, "parameters stream, but there are no slots for them; give at least 1");
  }
  *bytes = end + std::min<uint64_t>(slots, of_unit.size()) * unit_bytes;
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (!buckets[i].streams()) buckets[i].gpu_offset = gpu_offsets[i];
  }
  uint64_t unit_offset = WholeGranules(PlanGpu(buckets, SUPEROFFLOAD_MAX_DEVICE_SLOTS, /*max_tensors=*/0).bytes);
  for (const auto& [unit, run] : of_unit) {
    Move(*run, unit_offset, buckets, gpu_offsets);
    unit_offset += unit_bytes;
  }
  return {};
}

Status FindUnits(std::span<const GpuBucket> buckets, const GpuLayout& layout, kernels::UnitRanges* units) {
  struct Extent {
    uint64_t begin, end;
  };
  std::map<uint32_t, Extent> of_unit;
  for (const GpuBucket& bucket : buckets) {
    if (!bucket.streams()) continue;
    const Extent extent{bucket.gpu_offset, bucket.gpu_offset + bucket.parameters_bytes()};
    Extent& all = of_unit.emplace(bucket.unit, extent).first->second;
    all = {std::min(all.begin, extent.begin), std::max(all.end, extent.end)};
  }
  *units = {.count = of_unit.size()};
  if (of_unit.empty()) return {};
  const auto granule = [](uint64_t offset) { return offset / kernels::kUnitGranule * kernels::kUnitGranule; };
  units->offset = granule(of_unit.begin()->second.begin);
  for (const auto& [unit, extent] : of_unit) {
    units->bytes = std::max(units->bytes, WholeGranules(extent.end - granule(extent.begin)));
  }
  uint64_t offset = units->offset;
  bool in_order = offset >= layout.bytes;
  for (const auto& [unit, extent] : of_unit) {
    in_order = in_order && granule(extent.begin) == offset;
    offset += units->bytes;
  }
  if (in_order) return {};
  return Error(Code::kInvalidArgument,
               "parameters that stream do not lie where they must; take gpu_offset from superoffload_gpu_lay_out");
}

}  // namespace superoffload::client
