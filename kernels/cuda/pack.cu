// Packs a bucket's gradients: one block per chunk reads the tensors, writes the slot and sums the squares.
//
// The sum has the fixed order of adam.h: eight lanes, element index modulo 8, each in index order. So eight threads add
// while all others fetch: a tile goes to shared memory, is stored to the slot, and is summed while the next one comes.
#include "kernels/adam/adam_element.h"
#include "kernels/cuda/kernels.cuh"

namespace superoffload::kernels {
namespace {

constexpr unsigned kTile = 2048;
constexpr unsigned kNormLanes = 8;

// The tensor that holds element `i`, or the one before it: the last whose first element is not beyond.
__device__ uint32_t FindTensor(const PackArguments& a, uint64_t i) {
  uint32_t low = 0, high = a.tensor_count;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (a.tensors[middle].first <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ float GradientAt(const PackArguments& a, uint64_t i) {
  if (a.tensor_count == 0) return 0;  // the table is of an earlier bucket
  const PackedTensor& tensor = a.tensors[FindTensor(a, i)];
  if (i < tensor.first || i - tensor.first >= tensor.elements) return 0;  // a gap
  return LoadElement({tensor.data, a.dtype}, i - tensor.first);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kPackThreads) superoffload_pack(PackArguments a) {
  __shared__ float tiles[2][kTile];
  __shared__ double sums[kNormLanes];
  const uint64_t begin = uint64_t{blockIdx.x} * kChunkElements;
  const uint64_t end = a.elements < begin + kChunkElements ? a.elements : begin + kChunkElements;
  double lane = 0;
  unsigned buffer = 0;
  for (uint64_t first = begin; first < end + kTile; first += kTile, buffer ^= 1) {
    if (first < end) {
      for (unsigned j = threadIdx.x; j < kTile; j += kPackThreads) {
        const uint64_t i = first + j;
        if (i >= end) break;
        const float value = GradientAt(a, i);
        tiles[buffer][j] = value;
        StoreElement(a.slot, i, value);
      }
    }
    // The tile before, by the first eight threads, while their neighbours go ahead.
    if (threadIdx.x < kNormLanes && first > begin) {
      const uint64_t previous = first - kTile;
      const uint64_t count = end - previous < kTile ? end - previous : kTile;
      for (uint64_t j = threadIdx.x; j < count; j += kNormLanes) {
        const double value = tiles[buffer ^ 1][j];
        lane += value * value;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x < kNormLanes) sums[threadIdx.x] = lane;
  __syncthreads();
  if (threadIdx.x == 0) {
    double sum = 0;
    for (unsigned i = 0; i < kNormLanes; ++i) sum += sums[i];
    a.chunk_sums[blockIdx.x] = sum;
  }
}

}  // namespace superoffload::kernels
