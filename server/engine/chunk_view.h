// Where the kernels find a chunk of a bucket.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_CHUNK_VIEW_H_
#define SUPEROFFLOAD_SERVER_ENGINE_CHUNK_VIEW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/algorithm.h"
#include "server/engine/layout.h"

namespace superoffload::engine {

// Base addresses of an optimizer's memory, as Layout describes it. Not owned.
struct OptimizerMemory {
  std::byte* parameters = nullptr;
  std::byte* gradients = nullptr;
  std::byte* state = nullptr;
  std::byte* record = nullptr;  // Record::Bytes(layout); zero when new
};

struct ChunkView {
  size_t elements;
  uint64_t first;  // of the elements of its format
  kernels::StateView state;
  kernels::MutableElements parameters;
};

// Chunk `index` of `bucket`, counted within the bucket.
inline ChunkView ViewChunk(const Layout& layout, const OptimizerMemory& memory, const BucketLayout& bucket,
                           size_t index) {
  const size_t first = index * kernels::kChunkElements;
  kernels::StateView state;
  const StateFormat& format = layout.FormatOf(bucket);
  for (size_t array = 0; array < format.arrays.size(); ++array) {
    state.arrays[array] = memory.state + format.Byte(array, bucket.state_offset + first);
  }
  if (layout.directions_elements > 0) {
    state.directions = reinterpret_cast<float*>(memory.state + layout.directions_offset) + first;
  }
  return {.elements = std::min<size_t>(kernels::kChunkElements, bucket.elements - first),
          .first = bucket.state_offset + first,
          .state = state,
          .parameters = {memory.parameters + bucket.parameters_offset + first * kernels::DTypeBytes(bucket.dtype),
                         bucket.dtype}};
}

// What chunk `index` of `bucket` has of the gradient of step `t`, which lies in the bucket's log or in one of two
// slots.
inline kernels::ConstElements GradientOf(const OptimizerMemory& memory, const BucketLayout& bucket, size_t index,
                                         uint64_t t, bool logged) {
  const size_t first = index * kernels::kChunkElements * kernels::DTypeBytes(bucket.gradient_dtype);
  return {memory.gradients + bucket.GradientOffset(bucket.GradientSlot(t, logged)) + first, bucket.gradient_dtype};
}

// Its state for a pass over a part of it that has nothing but `parameter`, where state is rounded stochastically.
inline kernels::StateView StateOf(const Layout& layout, const ChunkView& chunk, uint32_t parameter, uint64_t seed) {
  kernels::StateView state = chunk.state;
  if (!layout.roundings.empty()) state.rounding = layout.RoundingOf(parameter, chunk.first, seed);
  return state;
}

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_CHUNK_VIEW_H_
