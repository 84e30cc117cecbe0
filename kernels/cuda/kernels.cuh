// What the GPU kernels work on; shared with the host code that launches them (cuda_kernels.h) and passed by value.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_KERNELS_CUH_
#define SUPEROFFLOAD_KERNELS_CUDA_KERNELS_CUH_

#include <cstdint>

#include "kernels/algorithm.h"

// The next loop, by the GPU's compiler.
#ifdef __CUDACC__
#define SUPEROFFLOAD_UNROLL _Pragma("unroll")
#else
#define SUPEROFFLOAD_UNROLL
#endif

namespace superoffload::kernels {

// One gradient tensor and its place in a bucket. The table of a bucket is sorted by `first`; tensors do not overlap.
struct PackedTensor {
  const void* data;  // contiguous, of the gradients' dtype
  uint64_t first;    // element of the bucket
  uint64_t elements;
};

// The gradients of a bucket; IndexChunks makes `chunk_begins`. The GPU reads each entry once or twice: pinned memory of
// the host is the place for it.
struct PackTable {
  const PackedTensor* tensors;
  const uint32_t* chunk_begins;  // per chunk, and for the end: the first tensor that ends behind the chunk's begin
  uint32_t count;                // of tensors; 0: nothing is read
};

// Packs the tensors of a bucket into a slot, casting on the way; gaps are filled. Or adds them to what the slot
// holds, in fp32, rounded to the slot's dtype as torch's in-place addition rounds; then gaps stay as they are. Any
// number of blocks gives the same bits. dtypes are the kernel's.
struct PackArguments {
  PackTable table;
  DType dtype;           // of the tensors
  MutableElements slot;  // float32 (gpu_fp32) or the gradients' dtype (fused)
  uint64_t elements;     // of the bucket
  double* chunk_sums;    // per chunk: SumOfSquares of elements.h of the slot, the same bits; not finite when a gradient
                         // is not
  bool adds = false;     // else the slot is written only
  float gap = 0;         // what gaps become then; -0, to which anything can be added
};

// name, dtype of the tensors, dtype of the slot; by the numbers of DType.
#define SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(X)              \
  X(superoffload_pack_bf16_to_bf16, kBFloat16, kBFloat16) \
  X(superoffload_pack_bf16_to_fp16, kBFloat16, kFloat16)  \
  X(superoffload_pack_bf16_to_fp32, kBFloat16, kFloat32)  \
  X(superoffload_pack_fp16_to_bf16, kFloat16, kBFloat16)  \
  X(superoffload_pack_fp16_to_fp16, kFloat16, kFloat16)   \
  X(superoffload_pack_fp16_to_fp32, kFloat16, kFloat32)   \
  X(superoffload_pack_fp32_to_bf16, kFloat32, kBFloat16)  \
  X(superoffload_pack_fp32_to_fp16, kFloat32, kFloat16)   \
  X(superoffload_pack_fp32_to_fp32, kFloat32, kFloat32)

// An optimizer on a range of a resident bucket: absorbs the gradient and publishes; the bits of `plain` of algorithm.h.
// A range begins where a block does (Algorithm::block_elements), and is of one parameter if state is rounded
// stochastically.
struct ResidentArguments {
  StateView state;
  StepConstants constants;
  ConstElements gradient;
  MutableElements theta;
  uint64_t elements;
  BoxElements box = {};  // of `state.rounding`, which points to none
};

// c = a * b, of square matrices, row by row.
struct ProductArguments {
  const float *a, *b;
  float* c;
  uint32_t n;  // rows and columns: a multiple of kProductTile
};

inline constexpr unsigned kProductTile = 16;
// Of a block of the product: a tile of each factor, which its code declares.
inline constexpr unsigned kProductStaticBytes = 2 * kProductTile * kProductTile * sizeof(float);
inline constexpr unsigned kPackThreads = 256;
inline constexpr unsigned kPackRows = 4;  // chunks that a block packs at a time
// Shared memory of a packing block, at most. A multiprocessor of an H100 has 228 KiB and takes 1 KiB more for each
// block: beside a matrix product's block of 200 KiB, 26 KiB are left.
inline constexpr unsigned kPackSharedBytes = 20 << 10;
inline constexpr unsigned kResidentThreads = 256;
inline constexpr unsigned kResidentEach = 4;  // elements that a thread of a resident's update takes at a time
// Shared memory of a block of the product: what large tiles of bf16 take in four stages, rounded up. Where the GPU has
// less for a block, all of it.
inline constexpr unsigned kProductSharedBytes = 200 << 10;

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_KERNELS_CUH_
