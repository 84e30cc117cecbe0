// The seam between the engine and the ways in which a trainer's bytes and signals travel.
//
// A transport carries the submissions of one attachment to a StepHandler and the completions back from it. The engine
// implements the handler and calls the sink; it knows neither rings nor descriptors nor CUDA.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_TRANSPORT_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"

namespace superoffload::transport {

// Hyper-parameters as a trainer submits them; not yet validated.
struct GroupUpdate {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
};

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

// What a trainer may submit. Called by one thread at a time. An error rejects the submission, which then had no effect.
class StepHandler {
 public:
  virtual ~StepHandler() = default;
  virtual absl::Status SetGroup(uint32_t group, const GroupUpdate& update) = 0;
  virtual absl::Status BeginStep(uint64_t step, double gradient_scale) = 0;
  // `sum_of_squares`: of the gradient, as kernels/adam defines it, when somebody has computed it already.
  virtual absl::Status GradientReady(uint64_t step, uint32_t bucket, std::optional<double> sum_of_squares) = 0;
  virtual absl::Status EndStep(uint64_t step, double gradient_scale, double max_grad_norm) = 0;
  virtual absl::Status AbandonStep(uint64_t step) = 0;
  virtual absl::Status MeasureNorm(uint64_t step, double gradient_scale) = 0;
};

// What the trainer is told. Called by any thread, never by two at once; must not block and not call the handler.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  virtual void SlotFree(uint64_t step, uint32_t bucket) = 0;
  virtual void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) = 0;
  virtual void NormMeasured(uint64_t step, double global_norm) = 0;
  virtual void VerdictReached(const VerdictReport& report) = 0;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_TRANSPORT_H_
