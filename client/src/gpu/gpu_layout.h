// Where things lie in the GPU memory of an attachment.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "client/src/status.h"
#include "kernels/adam/adam.h"
#include "kernels/cuda/kernels.cuh"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// From the numbers of DataType of optimizer.proto. False: it is none of them.
inline bool ToDType(uint32_t number, kernels::DType* dtype) {
  constexpr kernels::DType kByNumber[] = {kernels::DType::kBFloat16, kernels::DType::kFloat16,
                                          kernels::DType::kFloat32};
  if (number < 1 || number > 3) return false;
  *dtype = kByNumber[number - 1];
  return true;
}

// One bucket, on either side; offsets in bytes but for the state's.
struct GpuBucket {
  uint64_t elements = 0;
  uint64_t parameters_offset = 0;     // into the host's and the GPU's parameters
  uint64_t gradient_offsets[2] = {};  // into the host's gradients
  uint64_t state_offset = 0;          // elements
  kernels::DType dtype{}, gradient_dtype{};
  uint32_t group = 0;

  uint64_t parameters_bytes() const { return elements * kernels::DTypeBytes(dtype); }
  uint64_t gradient_bytes() const { return elements * kernels::DTypeBytes(gradient_dtype); }
  uint64_t chunks() const { return (elements + kernels::kChunkElements - 1) / kernels::kChunkElements; }
};

// Parameters at 0, laid out as the host's; then the gradient slots, the sums of squares and the tables of tensors.
struct GpuLayout {
  uint64_t slots = 0;
  uint64_t slots_offset = 0, slot_bytes = 0;
  uint64_t sums_offset = 0, sums_bytes = 0;       // per slot
  uint64_t tables_offset = 0, table_tensors = 0;  // per slot
  uint64_t bytes = 0;

  uint64_t slot_offset(uint64_t slot) const { return slots_offset + slot * slot_bytes; }
  uint64_t sums_of(uint64_t slot) const { return sums_offset + slot * sums_bytes; }
  uint64_t table_of(uint64_t slot) const {
    return tables_offset + slot * table_tensors * sizeof(kernels::PackedTensor);
  }
};

inline GpuLayout PlanGpu(const std::vector<GpuBucket>& buckets, uint64_t parameters_bytes, uint64_t slots,
                         uint64_t max_tensors) {
  constexpr uint64_t kAlignment = 4096;
  const auto aligned = [](uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  GpuLayout layout{.slots = slots, .table_tensors = max_tensors};
  for (const GpuBucket& bucket : buckets) {
    layout.slot_bytes = std::max(layout.slot_bytes, aligned(bucket.gradient_bytes()));
    layout.sums_bytes = std::max(layout.sums_bytes, aligned(bucket.chunks() * sizeof(double)));
  }
  layout.slots_offset = aligned(parameters_bytes);
  layout.sums_offset = layout.slots_offset + slots * layout.slot_bytes;
  layout.tables_offset = layout.sums_offset + slots * layout.sums_bytes;
  layout.bytes = layout.tables_offset + slots * max_tensors * sizeof(kernels::PackedTensor);
  return layout;
}

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_LAYOUT_H_
