#include "client/src/gpu/gpu_options.h"

#include <algorithm>
#include <cstring>

#include "kernels/gpu/unit_memory.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {

constexpr uint32_t kMostLogSlots = 32;  // as the daemon has it

static_assert(kManySlots <= SUPEROFFLOAD_MAX_DEVICE_SLOTS);

// In simulated steps they save at most 1 % of the time: so they may take at most 2 % of what would be left.
bool ManySlotsPay(uint64_t few_slots_bytes, uint64_t many_slots_bytes, uint64_t free_bytes) {
  constexpr uint64_t kLeastShare = 50;
  const uint64_t left = free_bytes - std::min(free_bytes, few_slots_bytes);
  return many_slots_bytes - few_slots_bytes <= left / kLeastShare;
}

Status CheckOptions(const superoffload_gpu_options& options) {
  if (options.mover <= SUPEROFFLOAD_MOVER_DIRECT && options.share <= 1 && options.push <= 1 &&
      options.device_slots <= SUPEROFFLOAD_MAX_DEVICE_SLOTS && options.next_slot <= 1 && options.scalars != nullptr &&
      options.array_offsets != nullptr) {
    return {};
  }
  return Error(Code::kInvalidArgument,
               "ill-formed superoffload_gpu_options; take scalars and arrays from the attach response, and at most ",
               SUPEROFFLOAD_MAX_DEVICE_SLOTS, " device slots");
}

Status ParseBuckets(const ModelLayout& model, size_t parameters_bytes, size_t gradients_bytes, bool in_place,
                    uint32_t stream_slots, std::vector<GpuBucket>* buckets) {
  const auto inside = [](uint64_t offset, uint64_t bytes, size_t size) {
    return offset <= size && bytes <= size - offset;
  };
  // Behind what does not stream lie device slots, and each unit has as many addresses as the largest one needs.
  const uint64_t most_bytes = parameters_bytes + gradients_bytes + 2 * kernels::kUnitGranule;
  const uint64_t gpu_bytes =
      stream_slots == 0 ? parameters_bytes : (model.bucket_count() + 2 * SUPEROFFLOAD_MAX_DEVICE_SLOTS) * most_bytes;
  for (size_t i = 0; i < model.bucket_count(); ++i) {
    const superoffload_bucket& given = model.bucket(i);
    GpuBucket bucket{.elements = given.elements,
                     .parameters_offset = given.parameters_offset,
                     .gpu_offset = given.gpu_offset,
                     .gradient_offsets = {given.gradient_offsets[0], given.gradient_offsets[1]},
                     .state_offset = given.state_offset,
                     .log_offset = given.log_offset,
                     .log_slots = given.log_slots,
                     .group = given.group,
                     .format = given.format,
                     .unit = given.unit};
    if (!ToDType(given.dtype, &bucket.dtype) || !ToDType(given.gradient_dtype, &bucket.gradient_dtype) ||
        given.elements > parameters_bytes || given.group >= model.group_count() ||
        !inside(given.parameters_offset, bucket.parameters_bytes(), parameters_bytes) ||
        !inside(given.gpu_offset, bucket.parameters_bytes(), gpu_bytes) ||
        !inside(given.gradient_offsets[0], bucket.gradient_bytes(), gradients_bytes) ||
        !inside(given.gradient_offsets[1], bucket.gradient_bytes(), gradients_bytes) ||
        given.log_slots > kMostLogSlots || !inside(given.log_offset, bucket.log_bytes(), gradients_bytes)) {
      return Error(Code::kInvalidArgument, "bucket ", i,
                   " does not fit the attachment; take the buckets from the attach response");
    }
    if (bucket.streams() && in_place) {
      return Error(Code::kFailedPrecondition,
                   "parameters that stream must not be published in place of gradients, which land while they may be "
                   "read again; create the optimizer without in_place");
    }
    if (bucket.streams() && stream_slots == 0) {
      return Error(Code::kInvalidArgument, "bucket ", i, " streams, but there are no slots; give at least 1");
    }
    buckets->push_back(bucket);
  }
  return {};
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
