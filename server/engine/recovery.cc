#include "server/engine/recovery.h"

#include <algorithm>

namespace superoffload::engine {
namespace {

// One chunk of a bucket, as the kernels see it.
struct Chunk {
  size_t n;
  kernels::AdamState state;
  kernels::ConstElements gradient;
};

Chunk At(const Layout& layout, const OptimizerMemory& memory, const BucketLayout& bucket, size_t chunk, uint64_t t) {
  const size_t first = (chunk - bucket.first_chunk) * kernels::kChunkElements;
  const auto array = [&](int i) {
    return reinterpret_cast<float*>(memory.state + layout.state_array_offsets[i]) + bucket.state_offset + first;
  };
  const std::byte* const gradient =
      memory.gradients + bucket.gradient_offsets[SlotOf(t)] + first * kernels::DTypeBytes(bucket.gradient_dtype);
  return {.n = std::min<size_t>(kernels::kChunkElements, bucket.elements - first),
          .state = {array(0), array(1), array(2)},
          .gradient = {gradient, bucket.gradient_dtype}};
}

}  // namespace

void AbsorbCommitted(const Layout& layout, const OptimizerMemory& memory, Record& record) {
  record.ForEachTorn([&](const Record::Torn& torn) {
    for (const BucketLayout& bucket : layout.buckets) {
      if (torn.chunk - bucket.first_chunk >= bucket.chunks()) continue;
      const Chunk chunk = At(layout, memory, bucket, torn.chunk, torn.step);
      kernels::UndoSlot& slot = record.slot(torn.worker);
      const size_t done = kernels::RestoreTornBlock(slot, chunk.n, chunk.state);
      if (done > chunk.n) continue;  // not what BucketPass writes; nothing is known about it
      kernels::Settle(chunk.n, chunk.state, record.Constants(torn.step, bucket.group), chunk.gradient, &slot, done);
      record.EndAbsorb(torn.worker, torn.chunk, torn.step);
    }
  });
  constexpr size_t kWorker = 0;  // nobody else is at work yet
  for (const BucketLayout& bucket : layout.buckets) {
    for (size_t index = bucket.first_chunk; index < bucket.first_chunk + bucket.chunks(); ++index) {
      while (record.absorbed(index) < record.committed()) {
        const uint64_t t = record.absorbed(index) + 1;
        const Chunk chunk = At(layout, memory, bucket, index, t);
        kernels::UndoSlot* const undo = record.BeginAbsorb(kWorker, index, t);
        kernels::Settle(chunk.n, chunk.state, record.Constants(t, bucket.group), chunk.gradient, undo);
        record.EndAbsorb(kWorker, index, t);
      }
    }
  }
}

}  // namespace superoffload::engine
