#include "server/engine/recovery.h"

namespace superoffload::engine {

void AbsorbCommitted(const Layout& layout, const OptimizerMemory& memory, Record& record) {
  record.ForEachTorn([&](const Record::Torn& torn) {
    for (const BucketLayout& bucket : layout.buckets) {
      if (torn.chunk - bucket.first_chunk >= bucket.chunks()) continue;
      const ChunkView chunk = ViewChunk(layout, memory, bucket, torn.chunk - bucket.first_chunk);
      kernels::UndoSlot& slot = record.slot(torn.worker);
      const size_t done = kernels::RestoreTornBlock(slot, chunk.elements, chunk.state);
      if (done > chunk.elements) continue;  // not what BucketPass writes; nothing is known about it
      kernels::Settle(chunk.elements, chunk.state, record.Constants(torn.step, bucket.group),
                      chunk.gradients[SlotOf(torn.step)], &slot, done);
      record.EndAbsorb(torn.worker, torn.chunk, torn.step);
    }
  });
  constexpr size_t kWorker = 0;  // nobody else is at work yet
  for (const BucketLayout& bucket : layout.buckets) {
    for (size_t i = 0; i < bucket.chunks(); ++i) {
      const ChunkView chunk = ViewChunk(layout, memory, bucket, i);
      const size_t index = bucket.first_chunk + i;
      while (record.absorbed(index) < record.committed()) {
        const uint64_t t = record.absorbed(index) + 1;
        kernels::UndoSlot* const undo = record.BeginAbsorb(kWorker, index, t);
        kernels::Settle(chunk.elements, chunk.state, record.Constants(t, bucket.group), chunk.gradients[SlotOf(t)],
                        undo);
        record.EndAbsorb(kWorker, index, t);
      }
    }
  }
}

}  // namespace superoffload::engine
