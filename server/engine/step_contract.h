// The contract of a step: what a trainer may submit, and what it is told. A transport carries the submissions of one
// attachment to a StepHandler and the completions back from it. The engine implements the handler and calls the sink;
// it knows neither rings nor descriptors nor CUDA.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_STEP_CONTRACT_H_
#define SUPEROFFLOAD_SERVER_ENGINE_STEP_CONTRACT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"

namespace superoffload::engine {

enum class Verdict : uint8_t { kCommit = 1, kClip = 2, kSkipNonFinite = 3, kSkipOverflow = 4, kSkipAbandoned = 5 };

constexpr bool IsSkip(Verdict verdict) { return verdict > Verdict::kClip; }

struct VerdictReport {
  Verdict verdict = Verdict::kCommit;
  uint64_t step = 0;
  double global_norm = 0;
  double clip_coefficient = 1;
  uint64_t committed_steps = 0;
  uint32_t speculated_buckets = 0;
  uint32_t republished_buckets = 0;
  uint32_t next_slot = 0;
  uint32_t consecutive_skips = 0;
  bool speculation_stands = false;
};

// Where the gradient of a bucket lies. In the bucket's log: then whoever trains updates its parameters itself, and
// those in the daemon's memory stay behind until somebody asks for them. In a slot, while the published parameters may
// still be read in this step: then nothing is published over them before the verdict.
enum class Landing : uint8_t { kSlot, kLog, kSlotStillRead };

// What all ranks of a run have gathered for a step that they have prepared.
struct RunTotal {
  double sum_of_squares = 0;  // of all ranks, added in rank order
  uint64_t attempt = 0;       // of this rank's, as Prepared told it
};

// What a trainer may submit. Called by one thread at a time. An error rejects the submission, which then had no effect.
class StepHandler {
 public:
  virtual ~StepHandler() = default;
  // Scalars [first, first + values.size()) of a parameter group, in the algorithm's order; not yet validated.
  virtual absl::Status SetScalars(uint32_t group, uint32_t first, std::span<const double> values) = 0;
  virtual absl::Status BeginStep(uint64_t step, double gradient_scale) = 0;
  // Parameters [first, first + count) have no gradient in this step: their weights, state and step count stay. Before
  // any of their buckets is submitted.
  virtual absl::Status ParametersAbsent(uint64_t step, uint32_t first, uint32_t count) = 0;
  // `sum_of_squares`: of the gradient, as NormLanes of kernels/elements defines it, when somebody has computed it
  // already; of one in a log always.
  virtual absl::Status GradientReady(uint64_t step, uint32_t bucket, std::optional<double> sum_of_squares,
                                     Landing landing = Landing::kSlot) = 0;
  // `streamed_bytes`: of parameters that the trainer copied to its GPU's slots again, for the report.
  virtual absl::Status EndStep(uint64_t step, double gradient_scale, double max_grad_norm,
                               uint64_t streamed_bytes = 0) = 0;
  // In a run of several ranks: every bucket has been submitted, and END_STEP will come with these values and the total.
  // Prepared answers when the gradients outlive trainer and daemon.
  virtual absl::Status PrepareStep(uint64_t step, double gradient_scale, double max_grad_norm) = 0;
  virtual absl::Status EndPreparedStep(uint64_t step, double gradient_scale, double max_grad_norm,
                                       const RunTotal& total) = 0;
  virtual absl::Status AbandonStep(uint64_t step) = 0;
  virtual absl::Status MeasureNorm(uint64_t step, double gradient_scale) = 0;
};

// What the trainer is told. Called by any thread, never by two at once; must not block and not call the handler.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  // What the gradient slot held of the bucket has been absorbed. `step`: the latest; it need not be open. `slot`: as
  // BucketLayout::GradientSlot.
  virtual void SlotFree(uint64_t step, uint32_t bucket, uint32_t slot) = 0;
  virtual void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) = 0;
  virtual void NormMeasured(uint64_t step, double norm, double sum_of_squares) = 0;  // of this rank
  // `sum_of_squares`: of this rank. Only a sum that was told here allows others to commit.
  virtual void Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) = 0;
  virtual void VerdictReached(const VerdictReport& report) = 0;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_STEP_CONTRACT_H_
