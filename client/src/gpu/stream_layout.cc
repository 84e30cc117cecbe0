#include "client/src/gpu/stream_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "client/src/core/model_layout.h"
#include "client/src/gpu/gpu_layout.h"

namespace superoffload::client {
namespace {

// Buckets of one unit, or of none, that lie one behind the other.
struct Run {
  uint32_t unit = 0;
  uint64_t begin = 0, end = 0;
  std::vector<uint32_t> buckets;
};

Status FindRuns(std::span<const superoffload_bucket> buckets, std::vector<Run>* runs) {
  std::vector<uint32_t> order(buckets.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, {}, [&](uint32_t bucket) { return buckets[bucket].gpu_offset; });
  for (const uint32_t bucket : order) {
    const superoffload_bucket& given = buckets[bucket];
    kernels::DType dtype{};
    if (!ToDType(given.dtype, &dtype)) {
      return Error(Code::kInvalidArgument, "bucket ", bucket, " has the unknown dtype ", given.dtype);
    }
    if (runs->empty() || runs->back().unit != given.unit) runs->push_back({given.unit, given.gpu_offset, 0, {}});
    runs->back().end = given.gpu_offset + given.elements * kernels::DTypeBytes(dtype);
    runs->back().buckets.push_back(bucket);
  }
  return {};
}

// Where in a page a run begins stays as it is, and so does how tensors are aligned.
uint64_t Move(const Run& run, uint64_t page, std::span<const superoffload_bucket> buckets,
              std::span<uint64_t> gpu_offsets) {
  const uint64_t begin = page + run.begin % WholePages(1);
  for (const uint32_t bucket : run.buckets) gpu_offsets[bucket] = begin + buckets[bucket].gpu_offset - run.begin;
  return WholePages(begin + run.end - run.begin);
}

}  // namespace

Status LayOutStreams(std::span<const superoffload_bucket> buckets, uint32_t slots, std::span<uint64_t> gpu_offsets,
                     uint64_t* bytes) {
  std::vector<Run> runs;
  if (Status status = FindRuns(buckets, &runs); !status.ok()) return status;
  std::map<uint32_t, const Run*> of_unit;
  uint64_t end = 0, slot_bytes = 0;
  for (const Run& run : runs) {
    if (run.unit == 0) {
      end = Move(run, end, buckets, gpu_offsets);
    } else if (!of_unit.emplace(run.unit, &run).second) {
      return Error(Code::kInvalidArgument, "the buckets of unit ", run.unit,
                   " do not lie beside each other; create the optimizer with Parameter.unit, and use the layout of "
                   "the attach response");
    } else {
      slot_bytes = std::max(slot_bytes, WholePages(run.begin % WholePages(1) + run.end - run.begin));
    }
  }
  if (!of_unit.empty() && slots == 0) {
    return Error(Code::kInvalidArgument, "parameters stream, but there are no slots for them; give at least 1");
  }
  uint32_t slot = 0;
  for (const auto& [unit, run] : of_unit) Move(*run, end + slot++ % slots * slot_bytes, buckets, gpu_offsets);
  *bytes = end + std::min<uint64_t>(slots, of_unit.size()) * slot_bytes;
  return {};
}

}  // namespace superoffload::client
