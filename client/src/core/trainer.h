// The trainer's side of steps, whatever language or framework computes the gradients.
//
//   a framework's adapter    hands over (parameter, range, pointer, stream), says what is absent, ends the step
//   Trainer                  knows the open step (open_step.h), counts buckets, begins, submits, remembers
//   GradientMover            brings gradients to where the daemon takes them
//   StepPlane                one attachment: its memory, its rings
//
// It outlives attachments. When the daemon dies, the call at hand is UNAVAILABLE, and what it was for is noted: the
// adapter attaches to the successor, in its own way, and Use() submits the open step again, to the end that it was
// given. Gradients may go on coming meanwhile.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_TRAINER_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_TRAINER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "client/src/core/gradient_mover.h"
#include "client/src/core/model_layout.h"
#include "client/src/core/open_step.h"
#include "client/src/core/step_plane.h"
#include "client/src/status.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// What is handed over in one call.
struct Gradients {
  std::span<const GradientPiece> pieces;
  std::span<const uint32_t> absent;   // parameters without a gradient in this step
  GradientSource source;              // of the pieces
  std::optional<double> begins_with;  // a step with this gradient scale; none: that of the last, where none is open
  std::span<uint64_t> digests;        // of the pieces, as of GradientMover::Take
};

// A whole step in one call.
struct WholeStep {
  std::span<const GradientPiece> pieces;  // with `absent` every parameter
  std::span<const uint32_t> absent;       // parameters without a gradient
  std::span<const uint32_t> scheduled;    // scalars that this step gives itself, by place among those of all groups
  std::span<const double> scalars;        // their values
  double gradient_scale = 1;
  double max_grad_norm = 0;
  std::span<void* const> parameters;  // where the published ones go, in order; may be where gradients are
  // At which point of it the pieces are there; `parameters` are when it has done what it is given here. None: on the
  // host, now.
  std::optional<StreamNumber> stream;
};

// Thread-safe. Calls that submit may wait for each other; those named Wait... hinder none of them.
class Trainer {
 public:
  // INVALID_ARGUMENT: what no attach response says.
  static Status Create(const superoffload_trainer_options& options, std::unique_ptr<Trainer>* trainer);
  ~Trainer();

  const ModelLayout& layout() const { return layout_; }
  uint32_t group_count() const { return layout_.group_count(); }
  uint32_t scalar_count() const { return layout_.scalar_count(); }

  // What became of the step that was open when a daemon died.
  enum class Resumed : uint32_t { kNothing = 0, kSubmitted = 1, kCommitted = 2, kLost = 3 };

  // What is submitted goes to this attachment from now on, which outlives the next call. `resumes`: an open step is
  // submitted again, unless `committed_steps` say that it was committed, or its gradients have gone with a GPU's slots;
  // else it is dropped.
  Status Use(StepPlane* plane, uint32_t next_slot, uint64_t committed_steps, bool resumes, Resumed* resumed);
  // Nowhere; the open step stays noted. The attachment has nothing on a GPU afterwards but its memory.
  void Leave();

  // Hyper-parameters of a group: of the open step, and of those that follow.
  Status SetScalars(uint32_t group, std::span<const double> scalars);

  // A bucket is submitted with its last piece. `left`, unless null, is appended the parameters of which nothing is
  // left.
  Status HandOver(const Gradients& gradients, std::vector<uint32_t>* left = nullptr);

  // Of a pass after which more come in the same step, see GradientMover::AddUp. All come for the last time by HandOver:
  // pieces without data are those of which nothing more has come.
  Status AddUp(const Gradients& gradients, std::vector<uint32_t>* left);

  Status MeasureNorm(double gradient_scale);
  Status End(const StepEnd& end);

  Status WaitNorm(const Deadline& deadline, StepProgress::Norm* norm);
  Status WaitPrepared(const Deadline& deadline, double* sum_of_squares);
  // The step that was ended is over for the trainer with its verdict, or with its last parameters.
  Status WaitVerdict(const Deadline& deadline, superoffload_verdict* verdict);
  Status WaitStep(const Deadline& deadline, superoffload_verdict* verdict);

  // Waits until the parameters in a bucket of the step that was ended last are final, in the host's memory; or until
  // they are published, and has `stream` wait for them.
  Status WaitBucket(uint32_t bucket, const Deadline& deadline);
  Status WaitBucketOnGpu(uint32_t bucket, StreamNumber stream, const Deadline& deadline);

  // Copies what `ranges` say, one per parameter, each once the parameter of the step that was ended last is final, and
  // takes digests of them as CopyAndDigest does. `received` becomes 1 for those it has: a call that its deadline has
  // cut off goes on with the rest.
  Status Receive(std::span<const superoffload_range> ranges, std::span<uint64_t> digests, std::span<uint8_t> received,
                 const Deadline& deadline);

  // Begins a step, ends it and waits until it is over. After an error no step is open. Nothing that `step` names is
  // used afterwards, but by its stream.
  Status Step(const WholeStep& step, superoffload_verdict* verdict);

  // A parameter, on the host, of which a piece of `values` has other bytes than the step that was ended last has left,
  // if any. Once gradients of a step have been lost nothing is compared.
  std::optional<uint32_t> FindChanged(std::span<const GradientPiece> values) const;
  // The same, by samples, other ones in every step.
  std::optional<uint32_t> FindChangedInSamples(std::span<const GradientPiece> values) const;

  // Of gradients in the host's memory that were handed over in the open step: the index of one that has other bytes by
  // now, or `pieces.size()`. INVALID_ARGUMENT: it was not handed over.
  Status FindEdited(std::span<const GradientPiece> pieces, size_t* index) const;

  // Elements of each parameter that have come in the open step; the error is the first that Fail() has noted in it.
  Status Arrived(std::span<uint64_t> elements) const;
  void Look(superoffload_open_step_state* step) const;
  uint64_t committed_steps() const;
  // For callers to whom nobody listens: whoever ends the step is told.
  Status Fail(Status status);

  // Calls `call(gpu)` with the attachment's GPU, and nobody submits meanwhile. FAILED_PRECONDITION: it has none.
  Status OnGpu(const std::function<Status(GpuGradients&)>& call);

  // The parameters of the step that was ended last, once they are final; `to`: where, in order, and null for those that
  // are not wanted. Waits for the daemon.
  Status Publish(std::span<void* const> to, std::optional<StreamNumber> stream);

 private:
  Trainer(const superoffload_trainer_options& options, ModelLayout layout);

  // With mutex_ held.
  Status CheckUsed() const;
  Status CheckTaking() const;
  Status BeginStep(double gradient_scale);
  Status TakeAll(std::span<const GradientPiece> pieces, const GradientSource& source, std::span<uint64_t> digests,
                 std::vector<uint32_t>* left);
  Status Note(const OpenStep::Handed& handed, std::vector<uint32_t>* left);
  Status SubmitAbsent(uint32_t parameter, std::vector<uint32_t>* left);
  Status SubmitScalars();
  Status SubmitEnd();
  Resumed WhatBecomes(bool committed, uint32_t former_slot) const;
  Status SubmitAgain(uint32_t former_slot);
  template <typename Submit>
  Status Deliver(Submit submit);
  Status RunStep(const WholeStep& step, superoffload_verdict* verdict);
  Status UseScheduled(const WholeStep& step);
  void Over(const superoffload_verdict& verdict);
  void Reset();
  template <typename Find>
  std::optional<uint32_t> FindChangedBy(std::span<const GradientPiece> values, Find find) const;

  // Without.
  template <typename Wait>
  Status Waiting(Wait wait);

  ModelLayout layout_;
  const uint32_t threads_;

  mutable std::mutex mutex_;  // protects what follows, and is held while submitting
  StepPlane* plane_ = nullptr;
  std::unique_ptr<GradientMover> mover_;      // of the attachment
  Status gone_;                               // why the attachment's daemon is; OK: it is there
  std::vector<std::vector<double>> scalars_;  // of each group; empty: those of the creation
  std::vector<std::vector<double>> sent_;     // of these, to the attachment
  uint32_t slot_ = 0;                         // of the host, that the open step fills, or the next one
  uint64_t committed_steps_ = 0;
  double expected_scale_ = 1;
  OpenStep step_;
  Status fault_;  // of the open step

  bool lost_ = false;    // a Step(), by the daemon's death
  uint64_t steps_ = 0;   // by Step()
  uint64_t skips_[6]{};  // of them, by the verdict's kind
  superoffload_verdict verdict_{};
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_TRAINER_H_
