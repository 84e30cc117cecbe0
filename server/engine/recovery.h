// Brings state that a killed engine left behind to its last committed step.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_
#define SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "server/engine/absorb.h"
#include "server/engine/bucket_pass.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/worker_pool.h"

namespace superoffload::engine {

// Absorbs every committed gradient that a chunk still lacks: all chunks of the optimizer as one job, or bucket after
// bucket where the algorithm has stages. May itself be killed at any instruction and run again.
class RecoveryPass final : public ChunkJob {
 public:
  // A step has been committed. `on_done` is called by a worker.
  RecoveryPass(const Layout& layout, const OptimizerMemory& memory, Record* record, std::function<void()> on_done);

  // Finishes the chunks whose update was cut off at once, then submits itself.
  void Start(const Platform& platform);

  void RunChunk(size_t index, size_t worker) override;
  void Done() override { on_done_(); }

 private:
  void Repair(const Record::Torn& torn);
  void AbsorbNextBucket();
  uint64_t LeastAbsorbed(const BucketLayout& bucket) const;
  std::vector<Segment> SegmentsOf(const BucketLayout& bucket, uint64_t t) const;
  // Where a stretch lies: elements of one chunk of a bucket.
  struct StretchPlace {
    const BucketLayout* bucket;
    uint64_t chunk;
    ElementRange range;
  };
  StretchPlace Find(size_t stretch) const;
  void Absorb(const StretchPlace& place, uint64_t t, size_t done, const kernels::AlgorithmKernels& kernels,
              kernels::UndoSlot* undo);

  const Layout& layout_;
  const OptimizerMemory memory_;
  Record& record_;
  const std::function<void()> on_done_;
  std::vector<StepValues> values_;  // of step t at t mod Layout::kept_steps
  // Where the algorithm has stages: passes of buckets, that whose directions are kept first, and how many are done
  // with.
  const Platform* platform_ = nullptr;
  std::vector<uint32_t> order_;
  size_t next_ = 0;
  std::vector<std::unique_ptr<BucketPass>> passes_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_
