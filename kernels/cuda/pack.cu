// Packs a bucket's gradients: one block per chunk reads the tensors, writes the slot and sums the squares.
//
//   tile n      16 bytes per thread and load, all in flight
//   tile n - 1  meanwhile eight threads add its squares, out of shared memory
//   tile n      to shared memory and to the slot
//
// The sum has the fixed order of NormLanes of elements.h: eight lanes, element index modulo 8, each in index order. That
// order is a chain of 8192 additions per chunk, which nothing shortens: so the eight threads do little else, and memory
// is waited for behind them. kernels/bench/README.md counts.
//
// A tile is searched for in the table once. Where one tensor covers it, and both ends are aligned, whole vectors are
// copied; else elements are.
#include <cmath>

#include "kernels/cuda/kernels.cuh"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {
// Not unnamed: the names of an unnamed one hold a hash of the path at which this file was compiled.
inline namespace packing {

constexpr unsigned kTile = 4096, kVector = 8;
constexpr unsigned kVectorsPerThread = kTile / kVector / kPackThreads;
constexpr uint32_t kCached = 128;  // tensors of a chunk; of more the table itself is read

struct alignas(16) Word {
  uint32_t bits[4];
};

// Eight elements, in one 16-byte word or two.
template <DType kDType>
struct Vector {
  Word words[kVector * DTypeBytes(kDType) / sizeof(Word)];

  __device__ float Get(unsigned i) const {
    if constexpr (kDType == DType::kFloat32) {
      return std::bit_cast<float>(words[i / 4].bits[i % 4]);
    } else {
      const auto half = static_cast<uint16_t>(words[0].bits[i / 2] >> i % 2 * 16);
      return kDType == DType::kBFloat16 ? WidenBFloat16(half) : WidenFloat16(half);
    }
  }
  __device__ void Set(unsigned i, float value) {
    if constexpr (kDType == DType::kFloat32) {
      words[i / 4].bits[i % 4] = std::bit_cast<uint32_t>(value);
    } else {
      const uint32_t half = kDType == DType::kBFloat16 ? NarrowToBFloat16(value) : NarrowToFloat16(value);
      uint32_t& pair = words[0].bits[i / 2];
      pair = i % 2 == 0 ? half : pair | half << 16;
    }
  }
};

template <DType kTo, DType kFrom>
__device__ Vector<kTo> Cast(const Vector<kFrom>& from) {
  if constexpr (kFrom == kTo) {
    return from;
  } else {
    Vector<kTo> to;
    SUPEROFFLOAD_UNROLL
    for (unsigned i = 0; i < kVector; ++i) to.Set(i, from.Get(i));
    return to;
  }
}

// What the slot holds of a gradient: what is summed.
template <DType kTo>
__device__ float Stored(float value) {
  Vector<kTo> one;
  one.Set(0, value);
  return one.Get(0);
}

// The tensors that have elements in a chunk, of which as many as fit are in shared memory.
struct ChunkTensors {
  const PackedTensor* cached;
  const PackedTensor* table;
  uint32_t count;

  __device__ PackedTensor At(uint32_t i) const { return i < kCached ? cached[i] : table[i]; }

  // The first that ends behind element `i` of the bucket, or `count`.
  __device__ uint32_t Find(uint64_t i) const {
    uint32_t low = 0, high = count;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      const PackedTensor tensor = At(middle);
      if (tensor.first + tensor.elements <= i) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

__device__ bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Word) == 0; }

// Elements [first, first + count) of the bucket, where tensors meet or are not aligned.
template <DType kFrom, DType kTo>
__device__ void PackElements(const PackArguments& a, const ChunkTensors& tensors, uint32_t found, uint64_t first,
                             unsigned count, float* tile) {
  PackedTensor tensor{};
  if (found < tensors.count) tensor = tensors.At(found);
  for (unsigned j = threadIdx.x; j < count; j += kPackThreads) {
    const uint64_t i = first + j;
    while (found < tensors.count && i >= tensor.first + tensor.elements) {
      if (++found < tensors.count) tensor = tensors.At(found);
    }
    const bool gap = found == tensors.count || i < tensor.first;
    const float value = gap ? 0 : LoadElement({tensor.data, kFrom}, i - tensor.first);
    StoreElement({a.slot.data, kTo}, i, value);
    tile[j] = Stored<kTo>(value);
  }
}

// Adds the squares of a lane's elements of a tile, in index order. A square of an fp32 number is exact in fp64.
__device__ double AddTile(const float* tile, unsigned count, double lane) {
  unsigned j = threadIdx.x;
  for (; j + 15 * kNormLanes < count; j += 16 * kNormLanes) {
    float values[16];
    SUPEROFFLOAD_UNROLL
    for (unsigned k = 0; k < 16; ++k) values[k] = tile[j + k * kNormLanes];
    SUPEROFFLOAD_UNROLL
    for (unsigned k = 0; k < 16; ++k) lane = fma(double{values[k]}, double{values[k]}, lane);
  }
  for (; j < count; j += kNormLanes) lane = fma(double{tile[j]}, double{tile[j]}, lane);
  return lane;
}

template <DType kFrom, DType kTo>
__device__ void RunPack(const PackArguments& a) {
  alignas(16) __shared__ float tiles[2][kTile];
  __shared__ PackedTensor cached[kCached];
  __shared__ double sums[kNormLanes];
  const uint64_t begin = uint64_t{blockIdx.x} * kChunkElements;
  const uint64_t end = a.elements < begin + kChunkElements ? a.elements : begin + kChunkElements;
  ChunkTensors tensors{cached, nullptr, 0};
  if (a.table.count > 0) {
    const uint32_t first = a.table.chunk_begins[blockIdx.x];
    const uint32_t last = a.table.chunk_begins[blockIdx.x + 1];  // may reach over the border
    tensors.table = a.table.tensors + first;
    tensors.count = (last < a.table.count ? last + 1 : a.table.count) - first;
    for (uint32_t i = threadIdx.x; i < kCached && i < tensors.count; i += kPackThreads) cached[i] = tensors.table[i];
  }
  __syncthreads();
  double lane = 0;
  unsigned buffer = 0, before = 0;  // elements of the tile before
  for (uint64_t first = begin; first < end || before > 0; first += kTile, buffer ^= 1) {
    const unsigned count = first >= end ? 0 : end - first < kTile ? static_cast<unsigned>(end - first) : kTile;
    const uint32_t found = count > 0 ? tensors.Find(first) : 0;
    Vector<kFrom> vectors[kVectorsPerThread];
    bool whole = false;
    if (count == kTile && found < tensors.count) {
      const PackedTensor tensor = tensors.At(found);
      whole = tensor.first <= first && first + kTile <= tensor.first + tensor.elements && Aligned(a.slot.data);
      const uint64_t skipped = whole ? (first - tensor.first) * DTypeBytes(kFrom) : 0;
      const auto* const from = static_cast<const std::byte*>(tensor.data) + skipped;
      whole = whole && Aligned(from);
      if (whole) {
        SUPEROFFLOAD_UNROLL
        for (unsigned v = 0; v < kVectorsPerThread; ++v) {
          vectors[v] = reinterpret_cast<const Vector<kFrom>*>(from)[v * kPackThreads + threadIdx.x];
        }
      }
    }
    if (threadIdx.x < kNormLanes) lane = AddTile(tiles[buffer ^ 1], before, lane);
    float* const tile = tiles[buffer];
    if (whole) {
      auto* const to = reinterpret_cast<Vector<kTo>*>(static_cast<std::byte*>(a.slot.data) + first * DTypeBytes(kTo));
      SUPEROFFLOAD_UNROLL
      for (unsigned v = 0; v < kVectorsPerThread; ++v) {
        const unsigned place = v * kPackThreads + threadIdx.x;
        const Vector<kTo> stored = Cast<kTo>(vectors[v]);
        Vector<DType::kFloat32> values;
        SUPEROFFLOAD_UNROLL
        for (unsigned i = 0; i < kVector; ++i) values.Set(i, stored.Get(i));
        to[place] = stored;
        reinterpret_cast<Vector<DType::kFloat32>*>(tile)[place] = values;
      }
    } else {
      PackElements<kFrom, kTo>(a, tensors, found, first, count, tile);
    }
    before = count;
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

}  // namespace packing

#define SUPEROFFLOAD_PACK_KERNEL(name, from, to)                                             \
  extern "C" __global__ void __launch_bounds__(kPackThreads) name(PackArguments arguments) { \
    RunPack<DType::from, DType::to>(arguments);                                              \
  }
SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(SUPEROFFLOAD_PACK_KERNEL)

}  // namespace superoffload::kernels
