// Where things lie in the GPU memory of an attachment.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "client/src/core/model_layout.h"
#include "client/src/status.h"
#include "kernels/cuda/kernels.cuh"
#include "kernels/elements/elements.h"
#include "kernels/gpu/mover.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// A piece of a bucket's gradient on the GPU, contiguous.
struct BucketTensor {
  uint64_t data = 0;   // device pointer
  uint64_t first = 0;  // element of the bucket
  uint64_t elements = 0;
};

// A bucket's gradients may come in several passes of a step, which are added up in the host's slot.
struct Pass {
  bool adds = false;  // to those before
  bool last = true;   // the daemon is told
};

constexpr uint64_t WholePages(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// One bucket, on either side; offsets in bytes but for the state's.
struct GpuBucket {
  uint64_t elements = 0;
  uint64_t parameters_offset = 0;     // into the host's parameters
  uint64_t gpu_offset = 0;            // into the GPU's: of the parameters
  uint64_t gradient_offsets[2] = {};  // into the host's gradients
  uint64_t state_offset = 0;          // elements
  uint64_t log_offset = 0;            // into the host's gradients
  uint32_t log_slots = 0;
  kernels::DType dtype{}, gradient_dtype{};
  uint32_t group = 0;
  uint32_t format = 0;  // of its state
  uint32_t unit = 0;    // that it streams with; 0: it stays on the GPU

  bool streams() const { return unit != 0; }
  uint64_t parameters_bytes() const { return elements * kernels::DTypeBytes(dtype); }
  uint64_t gradient_bytes() const { return elements * kernels::DTypeBytes(gradient_dtype); }
  bool one_slot() const { return gradient_offsets[0] == gradient_offsets[1]; }  // both are the same memory
  uint64_t log_slot_bytes() const { return WholePages(gradient_bytes()); }
  uint64_t log_bytes() const { return log_slots < 2 ? 0 : (log_slots - 2) * log_slot_bytes(); }  // from log_offset on
  uint64_t chunks() const { return (elements + kernels::kChunkElements - 1) / kernels::kChunkElements; }

  // As the mover knows it.
  kernels::MovedBucket moved() const {
    return {.gradient_offsets = {gradient_offsets[0], gradient_offsets[1]},
            .gradient_bytes = gradient_bytes(),
            .log_offset = log_offset,
            .log_slot_bytes = log_slot_bytes(),
            .log_slots = log_slots,
            .parameters_offset = parameters_offset,
            .gpu_offset = gpu_offset,
            .parameters_bytes = parameters_bytes(),
            .chunks = chunks()};
  }
};

// The parameters that do not stream, each bucket at its gpu_offset; then the slots for gradients and the sums of
// squares.
struct GpuLayout {
  kernels::DeviceSlots slots;
  uint64_t bytes = 0;
  uint64_t most_tensors = 0, most_chunks = 0;  // of a bucket
};

inline GpuLayout PlanGpu(const std::vector<GpuBucket>& buckets, uint64_t slots, uint64_t max_tensors) {
  GpuLayout layout{.slots = {.count = slots}, .bytes = 0, .most_tensors = max_tensors};
  uint64_t parameters_bytes = 0;
  for (const GpuBucket& bucket : buckets) {
    if (!bucket.streams()) {
      parameters_bytes = std::max(parameters_bytes, bucket.gpu_offset + bucket.parameters_bytes());
    }
    layout.slots.bytes = std::max(layout.slots.bytes, WholePages(bucket.gradient_bytes()));
    layout.most_chunks = std::max(layout.most_chunks, bucket.chunks());
    layout.slots.sums_bytes = std::max(layout.slots.sums_bytes, WholePages(bucket.chunks() * sizeof(double)));
  }
  layout.slots.offset = WholePages(parameters_bytes);
  layout.slots.sums_offset = layout.slots.offset + slots * layout.slots.bytes;
  layout.bytes = layout.slots.sums_offset + slots * layout.slots.sums_bytes;
  return layout;
}

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_LAYOUT_H_
