// Steps that one call makes, from the gradients to the parameters.
#include <iterator>

#include "client/src/core/trainer.h"

namespace superoffload::client {
namespace {

constexpr char kLost[] =
    "; the step inside jit is lost: pull_params() attaches to the daemon's successor and returns the parameters that "
    "it has";

}  // namespace

Status Trainer::Step(const WholeStep& step, superoffload_verdict* verdict) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckUsed(); !status.ok()) return status;
  if (lost_) return Error(Code::kUnavailable, "the daemon is gone", kLost);
  if (Status status = mover_->Check({.stream = step.stream}); !status.ok()) return status;
  if (step_.begun) {
    return Error(Code::kFailedPrecondition,
                 "step() inside jit takes the gradients of all parameters, but offloaded layers have handed some over; "
                 "end that step with finish(), outside of jit");
  }
  Status status = RunStep(step, verdict);
  if (!status.ok() && status.code != Code::kUnavailable && step_.begun && !step_.end && plane_->AbandonStep().ok()) {
    plane_->WaitStep(std::nullopt, nullptr);
  }
  if (!status.ok()) mover_->WaitPacked();  // gradients are no longer ours
  Reset();
  lost_ = status.code == Code::kUnavailable;
  if (lost_) status.message += kLost;
  if (!status.ok()) return status;
  slot_ = verdict->next_slot % 2;
  committed_steps_ = verdict->committed_steps;
  ++steps_;
  if (verdict->kind > 2 && verdict->kind < std::size(skips_)) ++skips_[verdict->kind];
  verdict_ = *verdict;
  return mover_->Publish(step.parameters, step.stream);
}

Status Trainer::UseScheduled(const WholeStep& step) {
  if (step.scalars.size() != step.scheduled.size()) return Error(Code::kInvalidArgument, "not a value per scalar");
  for (size_t i = 0; i < step.scalars.size(); ++i) {
    const size_t group = step.scheduled[i] / scalar_count(), scalar = step.scheduled[i] % scalar_count();
    if (group >= scalars_.size() || scalars_[group].empty()) {
      return Error(Code::kInvalidArgument, "scalar ", step.scheduled[i], " does not exist");
    }
    scalars_[group][scalar] = step.scalars[i];
  }
  return {};
}

Status Trainer::RunStep(const WholeStep& step, superoffload_verdict* verdict) {
  if (Status status = UseScheduled(step); !status.ok()) return status;
  for (const GradientPiece& piece : step.pieces) {
    if (Status status = step_.Check(piece); !status.ok()) return status;
  }
  if (Status status = BeginStep(step.gradient_scale); !status.ok()) return status;
  std::vector<uint32_t> unused;
  for (const uint32_t parameter : step.absent) {
    if (Status status = SubmitAbsent(parameter, &unused); !status.ok()) return status;
  }
  const GradientSource source{.stream = step.stream, .stays = GradientSource::Stays::kUntilPacked};
  if (Status status = TakeAll(step.pieces, source, {}, &unused); !status.ok()) return status;
  if (Status status = step_.CheckComplete("the step cannot be ended"); !status.ok()) return status;
  if (Status status = plane_->EndStep(step.gradient_scale, step.max_grad_norm); !status.ok()) return status;
  step_.end = StepEnd{};
  // On a GPU this needs of the stream only what it was given before the call: the thread that waits may be the one that
  // gives it work.
  return plane_->WaitStep(std::nullopt, verdict);
}

}  // namespace superoffload::client
