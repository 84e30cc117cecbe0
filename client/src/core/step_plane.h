// One attachment: its mappings, and its steps as the trainer sees them.
//
// Submitting and waiting touch different members, so that one thread may do each. How submissions travel and who takes
// completions is the memory plane's (memory_plane.h), and what may be submitted when is the trainer's to know
// (trainer.h).
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_PLANE_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_PLANE_H_

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "client/src/core/memory_plane.h"
#include "client/src/core/step_progress.h"
#include "client/src/core/step_rings.h"
#include "client/src/descriptor_connection.h"
#include "client/src/mapping.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

class StepPlane {
 public:
  // `last_step` is the optimizer's count of steps so far.
  static Status Create(std::shared_ptr<DescriptorConnection> connection, uint64_t epoch, uint64_t last_step,
                       uint32_t bucket_count, std::unique_ptr<StepPlane>* plane);

  // Where they are published over their gradients, it is that of the gradients.
  const Mapping& parameters() const { return in_place_ ? gradients_ : parameters_; }
  const Mapping& gradients() const { return gradients_; }
  bool in_place() const { return in_place_; }

  // Private copy-on-write view, mapped on first use.
  Status State(const Mapping** state);

  // For another plane.
  DescriptorConnection& connection() { return *connection_; }
  uint64_t epoch() const { return epoch_; }
  uint32_t bucket_count() const { return bucket_count_; }
  StepRings& rings() { return rings_; }
  StepProgress& progress() { return progress_; }
  MemoryPlane& plane() { return *plane_; }
  void UsePlane(std::unique_ptr<MemoryPlane> plane) { plane_ = std::move(plane); }

  // Submitting, in an order that makes sense: a step is open where one must be.
  Status SetGroup(uint32_t group, std::span<const double> scalars);
  Status BeginStep(double gradient_scale);
  Status ParameterAbsent(uint32_t parameter);
  // The bucket's GRADIENT_READY, for the mover of gradients to submit.
  superoffload_ring_entry GradientReady(uint32_t bucket) const {
    return Entry(SUPEROFFLOAD_SUBMIT_GRADIENT_READY, bucket, {});
  }
  Status MeasureNorm(double gradient_scale);
  Status EndStep(double gradient_scale, double max_grad_norm);
  Status PrepareStep(double gradient_scale, double max_grad_norm);
  Status EndPreparedStep(double gradient_scale, double max_grad_norm, double total_sum_of_squares);
  Status AbandonStep();

  // FAILED_PRECONDITION: a step is open. Waits for the tail of the last one.
  Status WaitIdle();

  // Waiting; see superoffload.h.
  Status WaitNorm(const Deadline& deadline, double* norm, double* sum_of_squares = nullptr);
  Status WaitPrepared(const Deadline& deadline, double* sum_of_squares);
  Status WaitVerdict(const Deadline& deadline, superoffload_verdict* verdict);
  Status WaitParameters(uint32_t bucket, const Deadline& deadline);
  // Until some of the buckets that are not `final` are, and notes which; there must be one left.
  Status WaitMoreParameters(const Deadline& deadline, std::vector<bool>* final);
  Status WaitStep(const Deadline& deadline, superoffload_verdict* verdict);

  // As WaitParameters, but nothing to wait for is no error, and a step that has begun since is none either.
  // `with_verdict`: the bucket's are final when the verdict is known.
  Status WaitLatest(uint32_t bucket, bool with_verdict, const Deadline& deadline);
  // Whether WaitLatest without a verdict would not wait, by what is known.
  bool IsLatest(uint32_t bucket, const StepProgress& known) const;

 private:
  StepPlane(std::shared_ptr<DescriptorConnection> connection, Mapping ring, uint64_t epoch, uint64_t last_step,
            uint32_t bucket_count);
  superoffload_ring_entry Entry(superoffload_submission opcode, uint32_t index,
                                std::initializer_list<double> payload) const;
  Status Submit(superoffload_submission opcode, uint32_t index, std::initializer_list<double> payload);
  Status CheckBucket(uint32_t bucket) const;
  static Status CheckEnd(double gradient_scale, double max_grad_norm);
  Status SubmitEnd(superoffload_submission opcode, const superoffload_end_payload& end);
  void End();
  Status WaitOver();
  Status WaitUntil(uint64_t step, const Deadline& deadline, const MemoryPlane::Condition& done);

  const std::shared_ptr<DescriptorConnection> connection_;
  const uint64_t epoch_;
  const uint64_t last_step_;  // before this attachment
  const uint32_t bucket_count_;
  StepRings rings_;
  Mapping parameters_, gradients_, state_;
  bool in_place_ = false;
  FileDescriptor state_file_;
  size_t state_bytes_ = 0;

  // Submitting.
  uint64_t step_;
  bool open_ = false;

  // What the waiting thread waits for.
  std::atomic<uint64_t> ended_step_;
  std::atomic<uint64_t> measured_step_ = 0;
  std::atomic<uint64_t> prepared_step_ = 0;     // that was asked to be prepared
  std::atomic<uint64_t> prepared_attempt_ = 0;  // of it, once the waiting thread has seen that it is

  StepProgress progress_;               // the plane's to change
  std::unique_ptr<MemoryPlane> plane_;  // the first to go: it uses the others
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_PLANE_H_
