// One pass of the kernels over one bucket, as a job of the worker pool.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_BUCKET_PASS_H_
#define SUPEROFFLOAD_SERVER_ENGINE_BUCKET_PASS_H_

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/adam/adam.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/step_observer.h"
#include "server/engine/worker_pool.h"

namespace superoffload::engine {

// A gradient that the state has yet to absorb, and how.
struct PendingGradient {
  kernels::AdamStep step;
  uint32_t slot = 0;
  uint64_t t = 0;  // the committed step it belongs to; 0 while it is only speculated on
};

struct PassArguments {
  PassKind kind = PassKind::kNorm;
  std::optional<PendingGradient> absorb;  // kSpeculate, kUpdate, kSettle
  PendingGradient publish;                // kSpeculate, kUpdate, kRepublish; for kNorm only its slot counts
};

class BucketPass final : public ChunkJob {
 public:
  // `on_done(bucket)` is called by a worker after each pass.
  BucketPass(uint32_t bucket, const Layout& layout, const OptimizerMemory& memory, Record* record,
             std::function<void(uint32_t)> on_done);

  void Start(WorkerPool& pool, const PassArguments& arguments);

  const PassArguments& arguments() const { return arguments_; }

  // Of the gradient read by the last kNorm, kSpeculate, kUpdate or kRepublish: chunk sums added in order.
  double sum_of_squares() const { return sum_of_squares_; }

  PassReport report() const;

  void RunChunk(size_t index, size_t worker) override;
  void Done() override;

 private:
  const uint32_t bucket_;
  const Layout& layout_;
  const BucketLayout& bucket_layout_;
  const OptimizerMemory memory_;
  Record* const record_;
  const std::function<void(uint32_t)> on_done_;
  std::vector<double> chunk_sums_;
  PassArguments arguments_;
  double sum_of_squares_ = 0;
  absl::Time start_time_;
  absl::Duration duration_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_BUCKET_PASS_H_
