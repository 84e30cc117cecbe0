// One pass of the kernels over one bucket, as a job of the worker pool: in one round over its chunks, or, where the
// algorithm has stages, in a round for each of them and one that ends what they have prepared.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_BUCKET_PASS_H_
#define SUPEROFFLOAD_SERVER_ENGINE_BUCKET_PASS_H_

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/algorithm.h"
#include "server/engine/bucket_matrices.h"
#include "server/engine/chunk_view.h"
#include "server/engine/layout.h"
#include "server/engine/platform.h"
#include "server/engine/record.h"
#include "server/engine/step_observer.h"

namespace superoffload::engine {

// A range of a bucket whose parameters a pass treats alike. Where parameters lacked gradients there are several; what
// has nothing to absorb and nothing to publish belongs to none.
struct Segment {
  uint64_t begin = 0, end = 0;  // elements of the bucket
  uint32_t parameter = 0;       // the first of those parameters
  std::optional<kernels::StepConstants> absorb;
  std::optional<kernels::StepConstants> publish;  // for kNorm only its presence counts
};

// A committed step whose gradient is absorbed before those of `PassArguments`.
struct EarlierStep {
  uint64_t step = 0;
  std::vector<Segment> segments;
};

struct PassArguments {
  PassKind kind = PassKind::kNorm;
  std::vector<Segment> segments{};     // in order; not for kPublishMasters and kPush
  uint64_t absorbed_step = 0;          // the committed step whose gradient is absorbed; 0: none
  uint64_t step = 0;                   // whose gradient is published or measured
  bool sum_known = false;              // of its squares: a pass that publishes does not measure it again
  std::vector<EarlierStep> earlier{};  // of kAbsorb, in order: what else is absorbed, stretch by stretch
};

class BucketPass final : public ChunkJob {
 public:
  // `on_done(bucket)` is called by a worker after each pass, which may start the next one.
  BucketPass(uint32_t bucket, const Layout& layout, const OptimizerMemory& memory, Record* record,
             std::function<void(uint32_t)> on_done);

  // `when_idle`: see ChunkJob.
  void Start(const Platform& platform, PassArguments arguments, bool when_idle = false);

  const PassArguments& arguments() const { return arguments_; }

  // Of the gradient that the last pass measured, a kNorm or one without `sum_known`: chunk sums added in order.
  double sum_of_squares() const { return sum_of_squares_; }

  PassReport report() const;

  void RunChunk(size_t index, size_t worker) override;
  void Done() override;
  JobWork work() const override;

 private:
  // What all workers do before any of them does what comes next.
  struct Round {
    enum class Part { kAbsorb, kPublish, kBoth } part = Part::kBoth;
    std::optional<size_t> stage;  // of the algorithm; none: the chunks
  };

  std::vector<Round> RoundsOf(const PassArguments& arguments) const;
  void SubmitRound();
  void EndRound() const;
  void RunStage(size_t index) const;
  void AbsorbLog(size_t index, size_t worker);
  kernels::DType MasterType() const;
  const Round& round() const { return rounds_[round_]; }

  const uint32_t bucket_;
  const Layout& layout_;
  const BucketLayout& bucket_layout_;
  const OptimizerMemory memory_;
  Record* const record_;
  const std::function<void(uint32_t)> on_done_;
  std::optional<BucketMatrices> matrices_;  // of algorithms with stages
  std::vector<double> chunk_sums_;
  PassArguments arguments_;
  std::vector<Round> rounds_;
  size_t round_ = 0;
  uint64_t bytes_ = 0;  // of the rounds that have ended
  WorkerPool* pool_ = nullptr;
  double sum_of_squares_ = 0;
  const Clock* clock_ = nullptr;
  absl::Time start_time_;
  absl::Duration duration_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_BUCKET_PASS_H_
