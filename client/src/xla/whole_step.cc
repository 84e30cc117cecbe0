// Steps of a submitter that one call makes, from the gradients to the parameters.
#include <iterator>

#include "client/src/memory_passes.h"
#include "client/src/xla/piece_submitter.h"

namespace superoffload::client {
namespace {

constexpr char kLost[] =
    "; the step inside jit is lost: pull_params() attaches to the daemon's successor and returns the parameters that "
    "it has";

}  // namespace

Status PieceSubmitter::Step(const WholeStep& step, superoffload_verdict* verdict) {
  const std::lock_guard lock(mutex_);
  if (plane_ == nullptr) return Error(Code::kFailedPrecondition, "the optimizer is closed; build a new one");
  if (lost_) return Error(Code::kUnavailable, "the daemon is gone", kLost);
  if (Status status = step.stream ? UseGpu(*step.stream) : CheckWhere(step.stream); !status.ok()) return status;
  if (begun_ || taken_) {
    return Error(Code::kFailedPrecondition,
                 "step() inside jit takes the gradients of all parameters, but offloaded layers have handed some over; "
                 "end that step with finish(), outside of jit");
  }
  Status status = RunStep(step, verdict);
  if (!status.ok() && status.code != Code::kUnavailable && begun_ && plane_->AbandonStep().ok()) {
    plane_->WaitStep(std::nullopt, nullptr);
  }
  if (!status.ok() && gpu_) gpu_->WaitPacked();  // XLA's gradients are no longer ours
  Reset();
  lost_ = status.code == Code::kUnavailable;
  if (lost_) status.message += kLost;
  if (!status.ok()) return status;
  slot_ = verdict->next_slot % 2;
  committed_steps_ = verdict->committed_steps;
  ++steps_;
  if (verdict->kind > 2 && verdict->kind < std::size(skips_)) ++skips_[verdict->kind];
  verdict_ = *verdict;
  if (step.stream) return PublishOnGpu(step.parameters);
  PublishOnHost(step.parameters);
  return {};
}

Status PieceSubmitter::UseScheduled(const WholeStep& step) {
  if (step.scalars.size() != step.scheduled.size()) return Error(Code::kInvalidArgument, "not a value per scalar");
  for (size_t i = 0; i < step.scalars.size(); ++i) {
    const size_t group = step.scheduled[i] / scalar_count_, scalar = step.scheduled[i] % scalar_count_;
    if (group >= scalars_.size()) return Error(Code::kInvalidArgument, "scalar ", step.scheduled[i], " does not exist");
    scalars_[group][scalar] = step.scalars[i];
  }
  return {};
}

Status PieceSubmitter::RunStep(const WholeStep& step, superoffload_verdict* verdict) {
  if (Status status = UseScheduled(step); !status.ok()) return status;
  for (const GradientPiece& piece : step.pieces) {
    if (Status status = CheckPiece(piece); !status.ok()) return status;
  }
  if (Status status = Begin(step.gradient_scale); !status.ok()) return status;
  const Status gone = Error(Code::kUnavailable, "the daemon is gone");
  if (gone_) return gone;
  for (const uint32_t parameter : step.absent) {
    if (Status status = SubmitAbsent(parameter); !status.ok()) return status;
  }
  if (!step.stream) {
    Copy(step.pieces);
  } else {
    for (const GradientPiece& piece : step.pieces) in_place_[piece.parameter] = piece.data;
  }
  for (const GradientPiece& piece : step.pieces) {
    if (Status status = Arrive(piece.parameter, piece.first, piece.elements); !status.ok()) return status;
  }
  if (gone_) return gone;
  if (Status status = plane_->EndStep(step.gradient_scale, step.max_grad_norm); !status.ok()) return status;
  begun_ = false;
  // On the GPU this needs of XLA's stream only what it was given before the call: the thread that waits may be the one
  // that gives it work.
  return plane_->WaitStep(std::nullopt, verdict);
}

void PieceSubmitter::PublishOnHost(std::span<void* const> to) {
  const char* published = static_cast<const char*>(plane_->parameters().data());
  std::vector<superoffload_range> ranges;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ranges.push_back({published + parameters_[i].parameters_offset, to[i],
                      parameters_[i].elements * ElementBytes(parameters_[i].dtype)});
  }
  std::vector<uint64_t> digests(ranges.size());
  CopyAndDigest(ranges, threads_, digests);
}

}  // namespace superoffload::client
