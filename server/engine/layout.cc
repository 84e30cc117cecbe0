#include "server/engine/layout.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace superoffload::engine {
namespace {

// Array bases that are congruent modulo a large power of two collide in the caches' sets; this much stagger does not.
constexpr uint64_t kArrayStaggerBytes = 704;
constexpr uint64_t kRegionAlignmentBytes = 4096;

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Parameters that may share a bucket.
using RunKey = std::tuple<uint32_t, kernels::DType, kernels::DType>;

struct Run {
  RunKey key;
  std::vector<uint32_t> parameters;  // indices into the spec, last registered first
};

// Runs in the order in which their first parameter appears, counted from the end of the model.
std::vector<Run> CollectRuns(const OptimizerSpec& spec) {
  std::map<RunKey, size_t> index_of;
  std::vector<Run> runs;
  for (size_t i = spec.parameters.size(); i-- > 0;) {
    const ParameterSpec& parameter = spec.parameters[i];
    const RunKey key{parameter.group, parameter.dtype, parameter.gradient_dtype};
    const auto [it, inserted] = index_of.try_emplace(key, runs.size());
    if (inserted) runs.push_back(Run{key, {}});
    runs[it->second].parameters.push_back(static_cast<uint32_t>(i));
  }
  return runs;
}

// Lays one run after the other and cuts each into buckets.
class Planner {
 public:
  explicit Planner(const OptimizerSpec& spec)
      : spec_(spec), bucket_bytes_(spec.bucket_bytes == 0 ? kDefaultBucketBytes : spec.bucket_bytes) {
    layout_.placements.resize(spec.parameters.size());
  }

  void AddRun(const Run& run) {
    std::tie(group_, dtype_, gradient_dtype_) = run.key;
    bucket_capacity_ = bucket_bytes_ / kernels::DTypeBytes(gradient_dtype_) / kAlignmentElements * kAlignmentElements;
    layout_.parameters_bytes = RoundUp(layout_.parameters_bytes, kRegionAlignmentBytes);
    slot_bytes_ = RoundUp(slot_bytes_, kRegionAlignmentBytes);
    bool open = false;
    for (uint32_t index : run.parameters) {
      const uint64_t elements = RoundUp(ElementCount(spec_.parameters[index]), kAlignmentElements);
      if (!open || layout_.buckets.back().elements + elements > bucket_capacity_) OpenBucket();
      open = true;
      Place(layout_.placements[index], elements);
    }
  }

  Layout Finish() && {
    slot_bytes_ = RoundUp(slot_bytes_, kRegionAlignmentBytes);
    for (BucketLayout& bucket : layout_.buckets) {
      SetSlotOffsets(bucket.gradient_offsets);
      bucket.first_chunk = layout_.chunks;
      layout_.chunks += bucket.chunks();
    }
    for (Placement& placement : layout_.placements) SetSlotOffsets(placement.gradient_offsets);
    layout_.gradients_bytes = kGradientSlots * slot_bytes_;
    uint64_t offset = 0;
    for (uint64_t& array_offset : layout_.state_array_offsets) {
      array_offset = offset;
      offset = RoundUp(offset + layout_.state_elements * sizeof(float), kRegionAlignmentBytes) + kArrayStaggerBytes;
    }
    layout_.state_bytes = offset;
    return std::move(layout_);
  }

 private:
  void OpenBucket() {
    BucketLayout bucket{.group = group_, .dtype = dtype_, .gradient_dtype = gradient_dtype_};
    bucket.parameters_offset = layout_.parameters_bytes;
    bucket.gradient_offsets[0] = slot_bytes_;
    bucket.state_offset = layout_.state_elements;
    layout_.buckets.push_back(bucket);
  }

  void Place(Placement& placement, uint64_t elements) {
    placement.parameters_offset = layout_.parameters_bytes;
    placement.gradient_offsets[0] = slot_bytes_;
    placement.state_offset = layout_.state_elements;
    placement.first_bucket = static_cast<uint32_t>(layout_.buckets.size() - 1);
    while (elements > 0) {
      if (layout_.buckets.back().elements == bucket_capacity_) OpenBucket();
      const uint64_t taken = std::min(elements, bucket_capacity_ - layout_.buckets.back().elements);
      layout_.buckets.back().elements += taken;
      layout_.parameters_bytes += taken * kernels::DTypeBytes(dtype_);
      slot_bytes_ += taken * kernels::DTypeBytes(gradient_dtype_);
      layout_.state_elements += taken;
      elements -= taken;
    }
    placement.bucket_count = static_cast<uint32_t>(layout_.buckets.size() - placement.first_bucket);
  }

  void SetSlotOffsets(std::array<uint64_t, kGradientSlots>& offsets) const {
    for (uint32_t slot = 1; slot < kGradientSlots; ++slot) offsets[slot] = offsets[0] + slot * slot_bytes_;
  }

  const OptimizerSpec& spec_;
  const uint64_t bucket_bytes_;
  Layout layout_;
  uint64_t slot_bytes_ = 0;
  uint32_t group_ = 0;
  kernels::DType dtype_ = kernels::DType::kBFloat16;
  kernels::DType gradient_dtype_ = kernels::DType::kBFloat16;
  uint64_t bucket_capacity_ = 0;
};

}  // namespace

absl::StatusOr<Layout> PlanLayout(const OptimizerSpec& spec) {
  if (absl::Status status = ValidateSpec(spec); !status.ok()) return status;
  uint64_t elements = 0;
  for (const ParameterSpec& parameter : spec.parameters) {
    elements += ElementCount(parameter);
    if (elements > kMaxParameterElements) {
      return absl::InvalidArgumentError(
          "parameters: more than 2^40 elements in all; split them over several optimizers");
    }
  }
  const uint64_t bucket_bytes = spec.bucket_bytes == 0 ? kDefaultBucketBytes : spec.bucket_bytes;
  if (elements / (bucket_bytes / sizeof(float)) > kMaxBuckets) {
    return absl::InvalidArgumentError(absl::StrCat("bucket_bytes is ", bucket_bytes, " which cuts ", elements,
                                                   " elements into too many buckets; leave it 0 for 64 MiB"));
  }
  Planner planner(spec);
  for (const Run& run : CollectRuns(spec)) planner.AddRun(run);
  return std::move(planner).Finish();
}

}  // namespace superoffload::engine
