#include "client/src/gpu/gpu_options.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {

static_assert(kManySlots <= SUPEROFFLOAD_MAX_DEVICE_SLOTS);

// In simulated steps they save at most 1 % of the time: so they may take at most 2 % of what would be left.
bool ManySlotsPay(uint64_t few_slots_bytes, uint64_t many_slots_bytes, uint64_t free_bytes) {
  constexpr uint64_t kLeastShare = 50;
  const uint64_t left = free_bytes - std::min(free_bytes, few_slots_bytes);
  return many_slots_bytes - few_slots_bytes <= left / kLeastShare;
}

Status CheckOptions(const superoffload_gpu_options& options) {
  if (options.mover <= SUPEROFFLOAD_MOVER_DIRECT && options.share <= 1 && options.push <= 1 &&
      options.device_slots <= SUPEROFFLOAD_MAX_DEVICE_SLOTS && options.next_slot <= 1 && options.bucket_count != 0 &&
      options.buckets != nullptr && options.group_count != 0 && options.scalars != nullptr &&
      options.array_offsets != nullptr && options.parameter_offsets != nullptr && options.parameter_count != 0) {
    return {};
  }
  return Error(Code::kInvalidArgument,
               "ill-formed superoffload_gpu_options; take buckets and groups from the attach response, at most ",
               SUPEROFFLOAD_MAX_DEVICE_SLOTS, " device slots and at least one parameter");
}

Status ParseBuckets(const superoffload_gpu_options& options, size_t parameters_bytes, size_t gradients_bytes,
                    std::vector<GpuBucket>* buckets) {
  const auto inside = [](uint64_t offset, uint64_t bytes, size_t size) {
    return offset <= size && bytes <= size - offset;
  };
  for (uint32_t i = 0; i < options.bucket_count; ++i) {
    const superoffload_bucket& given = options.buckets[i];
    GpuBucket bucket{.elements = given.elements,
                     .parameters_offset = given.parameters_offset,
                     .gpu_offset = given.gpu_offset,
                     .gradient_offsets = {given.gradient_offsets[0], given.gradient_offsets[1]},
                     .state_offset = given.state_offset,
                     .group = given.group};
    if (!ToDType(given.dtype, &bucket.dtype) || !ToDType(given.gradient_dtype, &bucket.gradient_dtype) ||
        given.elements > parameters_bytes || given.group >= options.group_count ||
        !inside(given.parameters_offset, bucket.parameters_bytes(), parameters_bytes) ||
        !inside(given.gpu_offset, bucket.parameters_bytes(), parameters_bytes) ||
        !inside(given.gradient_offsets[0], bucket.gradient_bytes(), gradients_bytes) ||
        !inside(given.gradient_offsets[1], bucket.gradient_bytes(), gradients_bytes)) {
      return Error(Code::kInvalidArgument, "bucket ", i,
                   " does not fit the attachment; take the buckets from the attach response");
    }
    buckets->push_back(bucket);
  }
  return {};
}

std::vector<std::vector<StatePart>> CutIntoParts(const superoffload_gpu_options& options) {
  std::vector<uint32_t> order(options.parameter_count);
  std::iota(order.begin(), order.end(), 0);
  const auto offset = [&](uint32_t parameter) { return options.parameter_offsets[parameter]; };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return offset(a) < offset(b); });
  std::vector<std::vector<StatePart>> parts(options.bucket_count);
  for (uint32_t b = 0; b < options.bucket_count; ++b) {
    const uint64_t begin = options.buckets[b].state_offset, end = begin + options.buckets[b].elements;
    auto next = std::upper_bound(order.begin(), order.end(), begin,
                                 [&](uint64_t element, uint32_t parameter) { return element < offset(parameter); });
    uint64_t first = begin;
    while (first < end && next != order.begin()) {
      const uint64_t last = next == order.end() ? end : std::min(end, offset(*next));
      parts[b].push_back({*(next - 1), last - first});
      first = last;
      if (next != order.end()) ++next;
    }
  }
  return parts;
}

void CopyText(const std::string& text, std::span<char> field) {
  const size_t length = std::min(text.size(), field.size() - 1);
  std::memcpy(field.data(), text.data(), length);
  field[length] = '\0';
}

void Note(const std::string& text, superoffload_gpu_report* report) {
  const std::string notes = report->notes;
  CopyText(notes.empty() ? text : notes + "; " + text, report->notes);
}

}  // namespace superoffload::client
