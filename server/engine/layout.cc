#include "server/engine/layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace superoffload::engine {
namespace {

// Array bases that are congruent modulo a large power of two collide in the caches' sets; this much stagger does not.
constexpr uint64_t kArrayStaggerBytes = 704;
constexpr uint64_t kRegionAlignmentBytes = 4096;

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Parameters that may share a bucket.
using RangeKey = std::tuple<uint32_t, uint32_t, kernels::DType, kernels::DType>;  // format, group, dtypes

struct Range {
  RangeKey key;
  std::vector<uint32_t> parameters;  // indices into the spec, last registered first
};

// Ranges in the order in which their first parameter appears, counted from the end of the model.
std::vector<Range> CollectRanges(const OptimizerSpec& spec) {
  std::map<RangeKey, size_t> index_of;
  std::vector<Range> ranges;
  for (size_t i = spec.parameters.size(); i-- > 0;) {
    const ParameterSpec& parameter = spec.parameters[i];
    const RangeKey key{parameter.in_fp32 ? 1 : 0, parameter.group, parameter.dtype, parameter.gradient_dtype};
    const auto [it, inserted] = index_of.try_emplace(key, ranges.size());
    if (inserted) ranges.push_back(Range{key, {}});
    ranges[it->second].parameters.push_back(static_cast<uint32_t>(i));
  }
  return ranges;
}

// Lays one range after the other and cuts each into buckets.
class Planner {
 public:
  explicit Planner(const OptimizerSpec& spec)
      : spec_(spec),
        bucket_bytes_(spec.bucket_bytes == 0 ? kDefaultBucketBytes : spec.bucket_bytes),
        tapers_(spec.layout_version >= 4),
        alignment_(std::max<uint64_t>(spec.algorithm->block_elements,
                                      spec.layout_version >= 4 ? kAlignmentElements : kernels::kRangeAlignment)) {
    layout_.version = spec.layout_version;
    layout_.algorithm = spec.algorithm;
    layout_.groups = static_cast<uint32_t>(spec.groups.size());
    layout_.placements.resize(spec.parameters.size());
    layout_.formats.push_back({.algorithm = spec.algorithm});
    if (std::ranges::any_of(spec.parameters, &ParameterSpec::in_fp32)) {
      layout_.formats.push_back({.algorithm = spec.algorithm->in_fp32});
    }
    uint64_t before = 0;
    for (const ParameterSpec& parameter : spec.parameters) {
      bytes_before_.push_back(before);
      before += AlignedElements(parameter) * kernels::DTypeBytes(parameter.gradient_dtype);
    }
  }

  void AddRange(const Range& range) {
    std::tie(format_, group_, dtype_, gradient_dtype_) = range.key;
    slot_bytes_ = RoundUp(slot_bytes_, kRegionAlignmentBytes);
    const ParameterSpec* last = nullptr;
    for (uint32_t index : range.parameters) {
      const ParameterSpec& parameter = spec_.parameters[index];
      const uint64_t elements = AlignedElements(parameter);
      if (last == nullptr || last->unit != parameter.unit ||
          layout_.buckets.back().elements + elements > bucket_capacity_) {
        OpenBucket(index, elements);
      }
      last = &parameter;
      Place(index, elements);
    }
  }

  Layout Finish() && {
    slot_bytes_ = RoundUp(slot_bytes_, kRegionAlignmentBytes);
    PlaceParameters();
    for (BucketLayout& bucket : layout_.buckets) {
      SetSlotOffsets(bucket.gradient_offsets);
    }
    for (Placement& placement : layout_.placements) SetSlotOffsets(placement.gradient_offsets);
    layout_.gradients_bytes = spec_.gradient_slots * slot_bytes_;
    if (spec_.in_place) PutGradientsInPlace();
    LayOutLogs();
    layout_.has_one_slot = std::ranges::any_of(layout_.buckets, &BucketLayout::one_slot);
    for (BucketLayout& bucket : layout_.buckets) {
      bucket.first_stretch = layout_.stretches;
      layout_.stretches += bucket.stretches();
    }
    uint64_t offset = 0;
    for (StateFormat& format : layout_.formats) {
      for (const kernels::StateArray& array : format.algorithm->arrays) {
        format.arrays.push_back({offset, array});
        offset = RoundUp(offset + array.Bytes(format.elements), kRegionAlignmentBytes) + kArrayStaggerBytes;
      }
    }
    if (layout_.algorithm->stages != nullptr) offset = LayOutDirections(offset);
    if (layout_.algorithm->rounds_stochastically()) SetRoundings();
    layout_.state_bytes = offset;
    return std::move(layout_);
  }

 private:
  void PutGradientsInPlace() {
    layout_.in_place = true;
    layout_.gradients_bytes = layout_.parameters_bytes;
    for (BucketLayout& bucket : layout_.buckets) bucket.gradient_offsets.fill(bucket.parameters_offset);
    for (Placement& placement : layout_.placements) placement.gradient_offsets.fill(placement.parameters_offset);
  }

  void LayOutLogs() {
    const size_t logged = std::min<size_t>(spec_.logged_buckets, layout_.buckets.size());
    if (spec_.log_slots == 0 || logged == 0) return;
    layout_.kept_steps = std::max(layout_.kept_steps, spec_.log_slots);
    for (size_t i = layout_.buckets.size() - logged; i < layout_.buckets.size(); ++i) {
      BucketLayout& bucket = layout_.buckets[i];
      bucket.log_slots = spec_.log_slots;
      const uint64_t before = layout_.gradients_bytes;
      if (bucket.one_slot()) {
        bucket.gradient_offsets[1] = layout_.gradients_bytes;
        layout_.gradients_bytes += bucket.log_slot_bytes();
      }
      bucket.log_offset = layout_.gradients_bytes;
      layout_.gradients_bytes += (bucket.log_slots - kGradientSlots) * bucket.log_slot_bytes();
      layout_.logs_bytes += layout_.gradients_bytes - before;
    }
    layout_.has_logs = true;
  }

  // Says where in the parameter memory each bucket lies, and with it the parameters.
  void PlaceParameters() {
    std::vector<uint32_t> order(layout_.buckets.size());
    std::iota(order.begin(), order.end(), 0);
    if (layout_.version >= 5) {
      std::map<uint32_t, size_t> first_of;
      for (const uint32_t bucket : order) first_of.try_emplace(layout_.buckets[bucket].unit, first_of.size());
      std::ranges::stable_sort(order, {}, [&](uint32_t bucket) { return first_of.at(layout_.buckets[bucket].unit); });
    }
    const BucketLayout* before = nullptr;
    for (const uint32_t index : order) {
      BucketLayout& bucket = layout_.buckets[index];
      const bool follows =
          before != nullptr && SameRange(*before, bucket) && (layout_.version < 5 || before->unit == bucket.unit);
      if (!follows) layout_.parameters_bytes = RoundUp(layout_.parameters_bytes, kRegionAlignmentBytes);
      bucket.parameters_offset = layout_.parameters_bytes;
      layout_.parameters_bytes += bucket.parameters_bytes();
      before = &bucket;
    }
    for (Placement& placement : layout_.placements) {
      const BucketLayout& bucket = layout_.buckets[placement.first_bucket];
      const uint64_t elements = placement.state_offset - bucket.state_offset;
      placement.parameters_offset = bucket.parameters_offset + elements * kernels::DTypeBytes(bucket.dtype);
    }
  }

  static bool SameRange(const BucketLayout& a, const BucketLayout& b) {
    return RangeKey{a.format, a.group, a.dtype, a.gradient_dtype} ==
           RangeKey{b.format, b.group, b.dtype, b.gradient_dtype};
  }

  void SetRoundings() {
    for (const ParameterSpec& parameter : spec_.parameters) {
      ParameterRounding& rounding = layout_.roundings.emplace_back();
      rounding.hash = kernels::RoundingHash(parameter.name);
      if (!parameter.global_shape.empty()) {
        const bool fits =
            kernels::BoxElements::Make(parameter.shape, parameter.global_shape, parameter.global_offset, &rounding.box);
        SUPEROFFLOAD_CHECK(fits, "ValidateSpec has let ", parameter.name, " through");
      }
    }
  }

  // From byte `offset` of the state memory on; returns where they end.
  uint64_t LayOutDirections(uint64_t offset) {
    for (const ParameterSpec& parameter : spec_.parameters) {
      const uint64_t rows = parameter.shape.empty() ? 1 : parameter.shape.front();
      layout_.matrices.push_back({rows, ElementCount(parameter) / rows});
    }
    for (const BucketLayout& bucket : layout_.buckets) {
      uint64_t scratch = 0;
      for (const Part& part : layout_.PartsOf(bucket)) {
        const MatrixLayout& matrix = layout_.matrices[part.parameter];
        scratch += layout_.algorithm->stages->scratch_elements(matrix.rows, matrix.columns);
      }
      layout_.directions_elements = std::max(layout_.directions_elements, bucket.elements);
      layout_.scratch_elements = std::max(layout_.scratch_elements, scratch);
    }
    layout_.directions_offset = offset;
    const uint64_t bytes = (layout_.directions_elements + layout_.scratch_elements) * sizeof(float);
    return RoundUp(offset + bytes, kRegionAlignmentBytes);
  }

  uint64_t AlignedElements(const ParameterSpec& parameter) const {
    return RoundUp(ElementCount(parameter), alignment_);
  }

  // It begins with the last `elements` of the parameter.
  void OpenBucket(uint32_t parameter, uint64_t elements) {
    const uint64_t element_bytes = kernels::DTypeBytes(gradient_dtype_);
    uint64_t bytes = bucket_bytes_;
    if (tapers_) {
      const uint64_t left = bytes_before_[parameter] + elements * element_bytes;
      bytes = std::min(bytes, std::max(RoundUp(left / 2, kernels::kChunkElements * element_bytes), kTaperBytes));
    }
    bucket_capacity_ = bytes / element_bytes / alignment_ * alignment_;
    if (spec_.algorithm->stages != nullptr) bucket_capacity_ = std::max(bucket_capacity_, elements);
    BucketLayout bucket{.format = format_,
                        .group = group_,
                        .unit = spec_.parameters[parameter].unit,
                        .dtype = dtype_,
                        .gradient_dtype = gradient_dtype_};
    bucket.gradient_offsets[0] = slot_bytes_;
    bucket.state_offset = layout_.formats[format_].elements;
    bucket.first_part = static_cast<uint32_t>(layout_.parts.size());
    layout_.buckets.push_back(bucket);
  }

  void Place(uint32_t parameter, uint64_t elements) {
    Placement& placement = layout_.placements[parameter];
    placement.gradient_offsets[0] = slot_bytes_;
    placement.format = format_;
    placement.state_offset = layout_.formats[format_].elements;
    placement.first_bucket = static_cast<uint32_t>(layout_.buckets.size() - 1);
    while (elements > 0) {
      if (layout_.buckets.back().elements == bucket_capacity_) OpenBucket(parameter, elements);
      const uint64_t taken = std::min(elements, bucket_capacity_ - layout_.buckets.back().elements);
      layout_.buckets.back().elements += taken;
      layout_.parts.push_back({parameter, taken});
      ++layout_.buckets.back().part_count;
      slot_bytes_ += taken * kernels::DTypeBytes(gradient_dtype_);
      layout_.formats[format_].elements += taken;
      elements -= taken;
    }
    placement.bucket_count = static_cast<uint32_t>(layout_.buckets.size() - placement.first_bucket);
  }

  void SetSlotOffsets(std::array<uint64_t, kGradientSlots>& offsets) const {
    for (uint32_t slot = 1; slot < kGradientSlots; ++slot) {
      offsets[slot] = offsets[0] + slot % spec_.gradient_slots * slot_bytes_;
    }
  }

  const OptimizerSpec& spec_;
  const uint64_t bucket_bytes_;
  const bool tapers_;
  const uint64_t alignment_;
  std::vector<uint64_t> bytes_before_;  // of gradients, by parameter: of those registered before it
  Layout layout_;
  uint64_t slot_bytes_ = 0;
  uint32_t format_ = 0, group_ = 0;
  kernels::DType dtype_ = kernels::DType::kBFloat16;
  kernels::DType gradient_dtype_ = kernels::DType::kBFloat16;
  uint64_t bucket_capacity_ = 0;  // elements, of the bucket that was opened last
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
  for (const Range& range : CollectRanges(spec)) planner.AddRange(range);
  return std::move(planner).Finish();
}

}  // namespace superoffload::engine
