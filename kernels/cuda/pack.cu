// Packs a bucket's gradients: a block takes four chunks at a time, reads the tensors, writes the slot and sums the
// squares. Its threads are in four rows, one per chunk:
//
//   tile n      16-byte loads of every thread, all in flight
//   tile n - 1  meanwhile eight threads per row add its squares, out of shared memory
//   tile n      to the slot, and as it is stored to shared memory
//
// The sum has the fixed order of NormLanes of elements.h: eight lanes, element index modulo 8, each in index order.
// That order is a chain of 8192 additions per chunk, which nothing shortens. The four chains of a block are one warp,
// so they take as long as one. Which block packs a chunk, and how many there are (PackBlocks of cuda_kernels.h),
// changes no bit. kernels/bench/README.md counts.
//
// Kernels of the trainer run beside this one, so a block takes little shared memory: kPackSharedBytes of kernels.cuh.
//
// Where one tensor covers a tile, and both ends are aligned, whole vectors are copied; else elements are.
#include <cmath>

#include "kernels/cuda/kernels.cuh"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {
// Not unnamed: the names of an unnamed one hold a hash of the path at which this file was compiled.
inline namespace packing {

constexpr unsigned kVector = 8;  // elements
constexpr unsigned kRowThreads = kPackThreads / kPackRows;
constexpr unsigned kTileBytes = 2048;            // of a row
constexpr unsigned kRowBytes = kTileBytes + 32;  // rows begin in different banks
constexpr uint32_t kCached = 128;                // tensors of a block; of more the table itself is read
static_assert(kPackRows * kNormLanes <= kPackThreads);

// The dtype in which tiles are kept: it widens to fp32 in one instruction.
template <DType kTo>
constexpr DType kKept = kTo == DType::kBFloat16 ? kTo : DType::kFloat32;
template <DType kTo>
constexpr unsigned kTile = kTileBytes / DTypeBytes(kKept<kTo>);  // elements

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

// The sum in fp32, rounded.
template <DType kTo, DType kFrom>
__device__ Vector<kTo> Plus(const Vector<kTo>& held, const Vector<kFrom>& more) {
  Vector<kTo> sum;
  SUPEROFFLOAD_UNROLL
  for (unsigned i = 0; i < kVector; ++i) sum.Set(i, held.Get(i) + more.Get(i));
  return sum;
}

// What the slot holds of a gradient: what is summed.
template <DType kTo>
__device__ float Stored(float value) {
  Vector<kTo> one;
  one.Set(0, value);
  return one.Get(0);
}

// The tensors that have elements in a block's chunks, of which as many as fit are in shared memory.
struct BlockTensors {
  const PackedTensor* cached;
  const PackedTensor* table;
  uint32_t count;

  __device__ PackedTensor At(uint32_t i) const { return i < kCached ? cached[i] : table[i]; }

  // The first that ends behind element `i` of the bucket, or `count`; `found` is that of an element before.
  __device__ uint32_t Find(uint64_t i, uint32_t found) const {
    for (; found < count; ++found) {
      const PackedTensor tensor = At(found);
      if (i < tensor.first + tensor.elements) break;
    }
    return found;
  }
};

__device__ bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Word) == 0; }

// Elements [first, first + count) of the bucket, where tensors meet or are not aligned.
template <DType kFrom, DType kTo>
__device__ void PackElements(const PackArguments& a, const BlockTensors& tensors, uint32_t found, uint64_t first,
                             unsigned count, void* tile) {
  for (unsigned j = threadIdx.x % kRowThreads; j < count; j += kRowThreads) {
    const uint64_t i = first + j;
    found = tensors.Find(i, found);
    PackedTensor tensor{};
    if (found < tensors.count) tensor = tensors.At(found);
    const bool gap = found == tensors.count || i < tensor.first;
    float value = gap ? a.gap : LoadElement({tensor.data, kFrom}, i - tensor.first);
    if (a.adds) {
      const float held = LoadElement({a.slot.data, kTo}, i);
      value = gap ? held : held + value;
    }
    StoreElement({a.slot.data, kTo}, i, value);
    StoreElement({tile, kKept<kTo>}, j, Stored<kTo>(value));
  }
}

// Adds the squares of a lane's elements of a tile, in index order. A square of an fp32 number is exact in fp64.
template <DType kTo>
__device__ double AddTile(const void* tile, unsigned lane, unsigned count, double sum) {
  unsigned j = lane;
  for (; j + 15 * kNormLanes < count; j += 16 * kNormLanes) {
    float values[16];
    SUPEROFFLOAD_UNROLL
    for (unsigned k = 0; k < 16; ++k) values[k] = LoadElement({tile, kKept<kTo>}, j + k * kNormLanes);
    SUPEROFFLOAD_UNROLL
    for (unsigned k = 0; k < 16; ++k) sum = fma(double{values[k]}, double{values[k]}, sum);
  }
  for (; j < count; j += kNormLanes) {
    const double value = LoadElement({tile, kKept<kTo>}, j);
    sum = fma(value, value, sum);
  }
  return sum;
}

__device__ unsigned ChunkLength(const PackArguments& a, uint64_t chunk) {
  const uint64_t begin = chunk * kChunkElements;
  if (begin >= a.elements) return 0;
  return static_cast<unsigned>(a.elements - begin < kChunkElements ? a.elements - begin : kChunkElements);
}

// Of a chunk's tile at `offset`.
template <DType kTo>
__device__ unsigned TileLength(unsigned chunk_length, unsigned offset) {
  if (offset >= chunk_length) return 0;
  return chunk_length - offset < kTile<kTo> ? chunk_length - offset : kTile<kTo>;
}

// Chunks [first_chunk, first_chunk + kPackRows), as far as there are.
template <DType kFrom, DType kTo>
__device__ void PackChunks(const PackArguments& a, uint64_t first_chunk, uint64_t chunks) {
  constexpr DType kHeld = kKept<kTo>;
  constexpr unsigned kVectorsPerThread = kTile<kTo> / kVector / kRowThreads;
  alignas(16) __shared__ std::byte tiles[2][kPackRows][kRowBytes];
  __shared__ PackedTensor cached[kCached];
  __shared__ double sums[kPackRows * kNormLanes];
  static_assert(sizeof(tiles) + sizeof(cached) + sizeof(sums) <= kPackSharedBytes);
  const uint64_t chunk = first_chunk + threadIdx.x / kRowThreads;
  const uint64_t begin = chunk * kChunkElements;
  const unsigned length = ChunkLength(a, chunk), longest = ChunkLength(a, first_chunk);
  BlockTensors tensors{cached, nullptr, 0};
  uint32_t found = 0;
  if (a.table.count > 0) {
    const uint64_t end_chunk = first_chunk + kPackRows < chunks ? first_chunk + kPackRows : chunks;
    const uint32_t first = a.table.chunk_begins[first_chunk];
    const uint32_t last = a.table.chunk_begins[end_chunk];  // may reach over the border
    tensors.table = a.table.tensors + first;
    tensors.count = (last < a.table.count ? last + 1 : a.table.count) - first;
    found = a.table.chunk_begins[chunk < end_chunk ? chunk : end_chunk] - first;
    for (uint32_t i = threadIdx.x; i < kCached && i < tensors.count; i += kPackThreads) cached[i] = tensors.table[i];
  }
  __syncthreads();
  // The threads that add: what each adds is of another row than what it packs.
  const bool adds = threadIdx.x < kPackRows * kNormLanes;
  const unsigned added_row = threadIdx.x / kNormLanes, lane = threadIdx.x % kNormLanes;
  const unsigned added_length = adds ? ChunkLength(a, first_chunk + added_row) : 0;
  double sum = 0;
  unsigned buffer = 0;
  for (unsigned offset = 0; offset < longest + kTile<kTo>; offset += kTile<kTo>, buffer ^= 1) {
    const uint64_t first = begin + offset;
    const unsigned count = TileLength<kTo>(length, offset);
    Vector<kFrom> vectors[kVectorsPerThread];
    bool whole = false;
    if (count > 0) found = tensors.Find(first, found);
    if (count == kTile<kTo> && found < tensors.count) {
      const PackedTensor tensor = tensors.At(found);
      whole = tensor.first <= first && first + count <= tensor.first + tensor.elements && Aligned(a.slot.data);
      const uint64_t skipped = whole ? (first - tensor.first) * DTypeBytes(kFrom) : 0;
      const auto* const from = static_cast<const std::byte*>(tensor.data) + skipped;
      whole = whole && Aligned(from);
      if (whole) {
        SUPEROFFLOAD_UNROLL
        for (unsigned v = 0; v < kVectorsPerThread; ++v) {
          vectors[v] = reinterpret_cast<const Vector<kFrom>*>(from)[v * kRowThreads + threadIdx.x % kRowThreads];
        }
      }
    }
    if (adds && offset > 0) {
      const unsigned before = TileLength<kTo>(added_length, offset - kTile<kTo>);
      sum = AddTile<kTo>(tiles[buffer ^ 1][added_row], lane, before, sum);
    }
    std::byte* const tile = tiles[buffer][threadIdx.x / kRowThreads];
    if (whole) {
      auto* const to = reinterpret_cast<Vector<kTo>*>(static_cast<std::byte*>(a.slot.data) + first * DTypeBytes(kTo));
      SUPEROFFLOAD_UNROLL
      for (unsigned v = 0; v < kVectorsPerThread; ++v) {
        const unsigned place = v * kRowThreads + threadIdx.x % kRowThreads;
        const Vector<kTo> stored = a.adds ? Plus(to[place], vectors[v]) : Cast<kTo>(vectors[v]);
        to[place] = stored;
        reinterpret_cast<Vector<kHeld>*>(tile)[place] = Cast<kHeld>(stored);
      }
    } else {
      PackElements<kFrom, kTo>(a, tensors, found, first, count, tile);
    }
    __syncthreads();
  }
  if (adds) sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < kPackRows && first_chunk + threadIdx.x < chunks) {
    double total = 0;
    for (unsigned i = 0; i < kNormLanes; ++i) total += sums[threadIdx.x * kNormLanes + i];
    a.chunk_sums[first_chunk + threadIdx.x] = total;
  }
}

template <DType kFrom, DType kTo>
__device__ void RunPack(const PackArguments& a) {
  const uint64_t chunks = (a.elements + kChunkElements - 1) / kChunkElements;
  for (uint64_t first = uint64_t{blockIdx.x} * kPackRows; first < chunks; first += uint64_t{gridDim.x} * kPackRows) {
    PackChunks<kFrom, kTo>(a, first, chunks);
  }
}

}  // namespace packing

#define SUPEROFFLOAD_PACK_KERNEL(name, from, to)                                             \
  extern "C" __global__ void __launch_bounds__(kPackThreads) name(PackArguments arguments) { \
    RunPack<DType::from, DType::to>(arguments);                                              \
  }
SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(SUPEROFFLOAD_PACK_KERNEL)

}  // namespace superoffload::kernels
