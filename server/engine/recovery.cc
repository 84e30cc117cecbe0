#include "server/engine/recovery.h"

#include <algorithm>

#include "absl/synchronization/notification.h"

namespace superoffload::engine {
namespace {

// Every chunk of an optimizer, on all workers at once.
class AbsorbJob final : public ChunkJob {
 public:
  AbsorbJob(const Layout& layout, const OptimizerMemory& memory, Record& record)
      : layout_(layout), memory_(memory), record_(record) {}

  void RunChunk(size_t index, size_t worker) override {
    const BucketLayout& bucket = BucketOf(index);
    const ChunkView chunk = ViewChunk(layout_, memory_, bucket, index - bucket.first_chunk);
    while (record_.absorbed(index) < record_.committed()) {
      const uint64_t t = record_.absorbed(index) + 1;
      kernels::UndoSlot* const undo = record_.BeginAbsorb(worker, index, t);
      kernels::Settle(chunk.elements, chunk.state, record_.Constants(t, bucket.group), chunk.gradients[SlotOf(t)],
                      undo);
      record_.EndAbsorb(worker, index, t);
    }
  }

  // Finishes a chunk that was cut off under the slot that it was cut off under.
  void Repair(const Record::Torn& torn) {
    const BucketLayout& bucket = BucketOf(torn.chunk);
    const ChunkView chunk = ViewChunk(layout_, memory_, bucket, torn.chunk - bucket.first_chunk);
    kernels::UndoSlot& slot = record_.slot(torn.worker);
    const size_t done = kernels::RestoreTornBlock(slot, chunk.elements, chunk.state);
    if (done > chunk.elements) return;  // not what BucketPass writes; nothing is known about it
    kernels::Settle(chunk.elements, chunk.state, record_.Constants(torn.step, bucket.group),
                    chunk.gradients[SlotOf(torn.step)], &slot, done);
    record_.EndAbsorb(torn.worker, torn.chunk, torn.step);
  }

  void Done() override { done_.Notify(); }
  void Wait() { done_.WaitForNotification(); }

 private:
  const BucketLayout& BucketOf(size_t chunk) const {
    const auto after = [](size_t index, const BucketLayout& bucket) { return index < bucket.first_chunk; };
    return *(std::upper_bound(layout_.buckets.begin(), layout_.buckets.end(), chunk, after) - 1);
  }

  const Layout& layout_;
  const OptimizerMemory& memory_;
  Record& record_;
  absl::Notification done_;
};

}  // namespace

void AbsorbCommitted(const Layout& layout, const OptimizerMemory& memory, Record& record, WorkerPool& pool) {
  AbsorbJob job(layout, memory, record);
  record.ForEachTorn([&](const Record::Torn& torn) { job.Repair(torn); });
  pool.Submit(&job, layout.chunks);
  job.Wait();
}

}  // namespace superoffload::engine
