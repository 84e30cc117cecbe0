// What the GPU kernels work on; shared with the host code that launches them (cuda_kernels.h) and passed by value.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_KERNELS_CUH_
#define SUPEROFFLOAD_KERNELS_CUDA_KERNELS_CUH_

#include <cstdint>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {

// One gradient tensor and its place in a bucket. The table of a bucket is sorted by `first`; tensors do not overlap.
struct PackedTensor {
  const void* data;  // contiguous, of the gradients' dtype
  uint64_t first;    // element of the bucket
  uint64_t elements;
};

// Packs the tensors of a bucket into a slot, casting on the way; gaps become zeros. One block per chunk.
struct PackArguments {
  const PackedTensor* tensors;
  uint32_t tensor_count;
  DType dtype;           // of the tensors
  MutableElements slot;  // float32 (gpu_fp32) or the gradients' dtype (fused)
  uint64_t elements;     // of the bucket
  double* chunk_sums;    // per chunk: SumOfSquares of adam.h, the same bits; not finite when a gradient is not
};

// AdamW on a resident bucket: absorbs the gradient and publishes; the bits of Plain of adam.h.
struct ResidentArguments {
  AdamState state;
  AdamStep step;
  ConstElements gradient;
  MutableElements theta;
  uint64_t elements;
};

inline constexpr unsigned kPackThreads = 256;
inline constexpr unsigned kResidentThreads = 256;

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_KERNELS_CUH_
