// Brings state that a killed engine left behind to its last committed step.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_
#define SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_

#include <cstddef>
#include <functional>

#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/worker_pool.h"

namespace superoffload::engine {

// Absorbs every committed gradient that a chunk still lacks: all chunks of the optimizer as one job. May itself be killed
// at any instruction and run again.
class RecoveryPass final : public ChunkJob {
 public:
  // A step has been committed. `on_done` is called by a worker.
  RecoveryPass(const Layout& layout, const OptimizerMemory& memory, Record* record, std::function<void()> on_done);

  // Finishes the chunks whose update was cut off at once, then submits itself.
  void Start(WorkerPool& pool);

  void RunChunk(size_t index, size_t worker) override;
  void Done() override { on_done_(); }

 private:
  void Repair(const Record::Torn& torn);
  void Absorb(size_t index, uint64_t t, size_t done, const kernels::AlgorithmKernels& kernels,
              kernels::UndoSlot* undo);
  const BucketLayout& BucketOf(size_t chunk) const;

  const Layout& layout_;
  const OptimizerMemory memory_;
  Record& record_;
  const std::function<void()> on_done_;
  StepValues values_[2];  // of step t at t mod 2
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_RECOVERY_H_
