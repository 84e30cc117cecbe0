// The mutex is held while pieces are taken and submitted: the attachment takes submissions from one thread at a time,
// and a step is not ended or begun in the middle of a piece. Nobody waits for the daemon with it, but for the tail of a
// step that runs ahead, and in Step().
//
// What is submitted is noted first, so that a daemon may die at any moment: what it has not taken, its successor gets.
#include "client/src/core/trainer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "client/src/core/memory_plane.h"
#include "client/src/memory_passes.h"

namespace superoffload::client {
namespace {

// Of gradients that come together: what is copied before the first of their buckets are submitted.
constexpr uint64_t kBatchBytes = 32 << 20;

// A daemon that hangs must not hang its trainer's exit.
constexpr std::chrono::seconds kLeaveTimeout{30};

// Keeps the first error. False: nothing can follow; a daemon that dies in between has nothing to do with what does.
bool GoesOn(Status status, Status* result) {
  const bool goes_on = status.ok() || status.code == Code::kUnavailable;
  if (!goes_on || result->ok()) *result = std::move(status);
  return goes_on;
}

}  // namespace

Status Trainer::Create(const superoffload_trainer_options& options, std::unique_ptr<Trainer>* trainer) {
  if (options.group_count == 0 || options.scalar_count == 0 || options.threads == 0) {
    return Error(Code::kInvalidArgument, "there must be a group, a scalar and a thread");
  }
  ModelLayout layout;
  if (Status status = ModelLayout::Create(options, &layout); !status.ok()) return status;
  trainer->reset(new Trainer(options, std::move(layout)));
  return {};
}

Trainer::Trainer(const superoffload_trainer_options& options, ModelLayout layout)
    : layout_(std::move(layout)),
      threads_(options.threads),
      scalars_(options.group_count),
      sent_(options.group_count),
      step_(&layout_) {}

Trainer::~Trainer() = default;

void Trainer::Reset() {
  step_ = OpenStep(&layout_);
  fault_ = {};
  if (mover_ != nullptr) mover_->Drop();
}

void Trainer::Leave() {
  StepPlane* left = nullptr;
  bool open = false;  // a step that nobody ends; it began when the one before was over
  {
    const std::lock_guard lock(mutex_);
    mover_.reset();
    left = std::exchange(plane_, nullptr);
    open = step_.begun && !step_.ended();
  }
  if (left == nullptr || !left->plane().runs_ahead()) return;
  // The model keeps the parameters of the last step.
  if (!open) (void)left->WaitStep(std::chrono::steady_clock::now() + kLeaveTimeout, nullptr);
  left->plane().End();
}

Status Trainer::Use(StepPlane* plane, uint32_t next_slot, uint64_t committed_steps, bool resumes, Resumed* resumed) {
  const std::lock_guard lock(mutex_);
  mover_ = plane->plane().MakeGradientMover(&layout_, plane, threads_);
  plane_ = plane;
  gone_ = {};
  lost_ = false;
  for (std::vector<double>& sent : sent_) sent.clear();
  if (!resumes) {
    for (std::vector<double>& scalars : scalars_) scalars.clear();  // the optimizer may be another moment's
  }
  const uint32_t former_slot = std::exchange(slot_, next_slot % 2);
  const bool committed = std::exchange(committed_steps_, committed_steps) < committed_steps;
  *resumed = step_.begun && resumes ? WhatBecomes(committed, former_slot) : Resumed::kNothing;
  if (*resumed != Resumed::kSubmitted) Reset();
  Status status = SubmitScalars();
  if (status.ok() && *resumed == Resumed::kSubmitted) status = SubmitAgain(former_slot);
  // Of a daemon that dies meanwhile the next call tells: everything is noted.
  return status.code == Code::kUnavailable ? Status{} : status;
}

Trainer::Resumed Trainer::WhatBecomes(bool committed, uint32_t former_slot) const {
  if (committed) return Resumed::kCommitted;
  if (step_.has_sums) return Resumed::kLost;
  const bool there = std::ranges::all_of(step_.handed(), [&](const OpenStep::Handed& handed) {
    return handed.absent || mover_->Where(handed.piece, handed.source, former_slot) != nullptr;
  });
  return there ? Resumed::kSubmitted : Resumed::kLost;
}

// To a daemon that knows nothing of it.
Status Trainer::SubmitAgain(uint32_t former_slot) {
  const OpenStep former = std::exchange(step_, OpenStep(&layout_));
  step_.end = former.end;  // whatever of the rest is interrupted is noted all the same
  Status result = BeginStep(*former.begun);
  std::vector<uint32_t> unused;
  for (const OpenStep::Handed& handed : former.handed()) {
    OpenStep::Handed again = handed;
    Status status;
    if (!handed.absent) {
      again.piece.data = mover_->Where(handed.piece, handed.source, former_slot);
      status = mover_->Take({&again.piece, 1}, again.source, slot_, {});
    }
    if (status.ok()) status = Note(again, &unused);
    if (result.ok()) result = std::move(status);
  }
  if (result.ok() && step_.end) result = SubmitEnd();
  return result;
}

// Runs `submit`, which submits what is noted already.
template <typename Submit>
Status Trainer::Deliver(Submit submit) {
  if (!gone_.ok()) return gone_;
  Status status = submit();
  if (status.code == Code::kUnavailable) gone_ = status;
  return status;
}

Status Trainer::CheckUsed() const {
  if (plane_ != nullptr) return {};
  return Error(Code::kFailedPrecondition, "the optimizer is closed; build a new one");
}

Status Trainer::CheckTaking() const {
  if (Status status = CheckUsed(); !status.ok()) return status;
  if (step_.end) return Error(Code::kFailedPrecondition, "a gradient came while its step was being ended");
  return {};
}

Status Trainer::SetScalars(uint32_t group, std::span<const double> scalars) {
  const std::lock_guard lock(mutex_);
  if (group >= scalars_.size() || scalars.size() != scalar_count()) {
    return Error(Code::kInvalidArgument, "group ", group, " with ", scalars.size(), " scalars, but there are ",
                 scalars_.size(), " groups of ", scalar_count());
  }
  scalars_[group].assign(scalars.begin(), scalars.end());
  return step_.begun ? SubmitScalars() : Status{};
}

Status Trainer::SubmitScalars() {
  return Deliver([&]() -> Status {
    for (uint32_t group = 0; group < scalars_.size(); ++group) {
      if (sent_[group] == scalars_[group]) continue;
      if (Status status = plane_->SetGroup(group, scalars_[group]); !status.ok()) return status;
      sent_[group] = scalars_[group];
    }
    return {};
  });
}

// Nothing where it has begun.
Status Trainer::BeginStep(double gradient_scale) {
  if (step_.begun) return {};
  step_.begun = gradient_scale;
  Status status = SubmitScalars();
  if (status.ok()) status = Deliver([&] { return plane_->BeginStep(gradient_scale); });
  if (!status.ok() && status.code != Code::kUnavailable) step_.begun.reset();
  return status;
}

Status Trainer::HandOver(const Gradients& gradients, std::vector<uint32_t>* left) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckTaking(); !status.ok()) return status;
  if (gradients.begins_with && step_.begun) {
    return Error(Code::kFailedPrecondition, "a step is open; end or abandon it first");
  }
  if (!gradients.pieces.empty()) {
    if (Status status = mover_->Check(gradients.source); !status.ok()) return status;
  }
  for (const GradientPiece& piece : gradients.pieces) {
    if (Status status = step_.Check(piece); !status.ok()) return status;
  }
  for (const uint32_t parameter : gradients.absent) {
    if (Status status = step_.CheckAbsent(parameter); !status.ok()) return status;
  }
  std::vector<uint32_t> unused;
  if (left == nullptr) left = &unused;
  Status result;
  if (!GoesOn(BeginStep(gradients.begins_with.value_or(expected_scale_)), &result)) return result;
  for (const uint32_t parameter : gradients.absent) {
    if (!GoesOn(SubmitAbsent(parameter, left), &result)) return result;
  }
  GoesOn(TakeAll(gradients.pieces, gradients.source, gradients.digests, left), &result);
  return result;
}

Status Trainer::AddUp(const Gradients& gradients, std::vector<uint32_t>* left) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckTaking(); !status.ok()) return status;
  if (Status status = mover_->Check(gradients.source); !status.ok()) return status;
  for (const GradientPiece& piece : gradients.pieces) {
    if (Status status = step_.Check(piece); !status.ok()) return status;
  }
  step_.has_sums = true;
  if (Status status = BeginStep(expected_scale_); !status.ok()) return status;
  return Deliver([&] { return mover_->AddUp(gradients.pieces, gradients.source, left); });
}

// Even of a daemon that has died: the memory of the pieces is the caller's soon.
Status Trainer::TakeAll(std::span<const GradientPiece> pieces, const GradientSource& source,
                        std::span<uint64_t> digests, std::vector<uint32_t>* left) {
  Status result;
  for (size_t first = 0; first < pieces.size();) {
    uint64_t bytes = 0;
    size_t count = 0;
    while (first + count < pieces.size() && bytes < kBatchBytes) {
      const GradientPiece& piece = pieces[first + count++];
      bytes += piece.elements * kernels::DTypeBytes(piece.dtype);
    }
    const std::span<const GradientPiece> batch = pieces.subspan(first, count);
    const bool useless = !gone_.ok() && mover_->Where(batch.front(), source, slot_) == nullptr;
    const std::span<uint64_t> theirs = digests.empty() ? digests : digests.subspan(first, count);
    if (Status status = useless ? Status{} : mover_->Take(batch, source, slot_, theirs); !status.ok()) return status;
    for (const GradientPiece& piece : batch) {
      if (pieces.size() > 1) {  // what came with it may have brought the same
        if (Status status = step_.Check(piece); !status.ok()) return status;
      }
      if (!GoesOn(Note({.piece = piece, .source = source}, left), &result)) return result;
    }
    first += count;
  }
  return result;
}

// Submits the buckets that are complete with it.
Status Trainer::Note(const OpenStep::Handed& handed, std::vector<uint32_t>* left) {
  std::vector<uint32_t> complete;
  step_.Add(handed, &complete);
  Status result;
  if (handed.absent) result = Deliver([&] { return plane_->ParameterAbsent(handed.piece.parameter); });
  for (const uint32_t bucket : complete) {
    Status status = Deliver([&] { return mover_->Submit(plane_->GradientReady(bucket)); });
    step_.OnSubmitted(bucket, left);
    if (result.ok()) result = std::move(status);
  }
  return result;
}

Status Trainer::SubmitAbsent(uint32_t parameter, std::vector<uint32_t>* left) {
  if (Status status = step_.CheckAbsent(parameter); !status.ok()) return status;
  const GradientPiece whole{.parameter = parameter, .elements = layout_.parameter(parameter).elements};
  return Note({.piece = whole, .source = {}, .absent = true}, left);
}

Status Trainer::MeasureNorm(double gradient_scale) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckTaking(); !status.ok()) return status;
  if (Status status = step_.CheckComplete("measure_norm"); !status.ok()) return status;
  return Deliver([&] { return plane_->MeasureNorm(gradient_scale); });
}

Status Trainer::End(const StepEnd& end) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckUsed(); !status.ok()) return status;
  const bool abandons = end.kind == StepEnd::Kind::kAbandon;
  if (!step_.begun || step_.ended()) {
    if (abandons && !step_.begun) fault_ = {};  // of pieces that were refused
    return Error(Code::kFailedPrecondition, "no step is open that could be ended; hand over gradients first");
  }
  if (step_.end && (abandons || end.kind != StepEnd::Kind::kEndPrepared)) {
    return Error(Code::kFailedPrecondition, "the step is prepared, and ends with the total of all ranks only");
  }
  if (!abandons) {
    if (Status status = step_.CheckComplete("the step cannot be ended"); !status.ok()) return status;
  }
  const std::optional<StepEnd> before = std::exchange(step_.end, end);
  Status status = SubmitEnd();
  if (!status.ok() && status.code != Code::kUnavailable) step_.end = before;
  return status;
}

Status Trainer::SubmitEnd() {
  const StepEnd& end = *step_.end;
  return Deliver([&]() -> Status {
    for (const StreamNumber stream : end.streams) {
      if (Status status = mover_->EndAfter(stream); !status.ok()) return status;
    }
    switch (end.kind) {
      case StepEnd::Kind::kEnd:
        return plane_->EndStep(end.gradient_scale, end.max_grad_norm);
      case StepEnd::Kind::kPrepare:
        return plane_->PrepareStep(end.gradient_scale, end.max_grad_norm);
      case StepEnd::Kind::kEndPrepared:
        return plane_->EndPreparedStep(end.gradient_scale, end.max_grad_norm, end.total_sum_of_squares);
      case StepEnd::Kind::kAbandon:
        return plane_->AbandonStep();
    }
    return {};
  });
}

// `wait` waits with the attachment of now.
template <typename Wait>
Status Trainer::Waiting(Wait wait) {
  StepPlane* plane = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (Status status = CheckUsed(); !status.ok()) return status;
    if (!gone_.ok()) return gone_;
    plane = plane_;
  }
  Status status = wait(*plane);
  if (status.code == Code::kUnavailable) {
    const std::lock_guard lock(mutex_);
    if (plane == plane_ && gone_.ok()) gone_ = status;
  }
  return status;
}

Status Trainer::WaitNorm(const Deadline& deadline, StepProgress::Norm* norm) {
  return Waiting([&](StepPlane& plane) { return plane.WaitNorm(deadline, &norm->norm, &norm->sum_of_squares); });
}

Status Trainer::WaitPrepared(const Deadline& deadline, double* sum_of_squares) {
  return Waiting([&](StepPlane& plane) { return plane.WaitPrepared(deadline, sum_of_squares); });
}

Status Trainer::WaitVerdict(const Deadline& deadline, superoffload_verdict* verdict) {
  Status status = Waiting([&](StepPlane& plane) { return plane.WaitVerdict(deadline, verdict); });
  if (status.ok()) Over(*verdict);
  return status;
}

Status Trainer::WaitStep(const Deadline& deadline, superoffload_verdict* verdict) {
  Status status = Waiting([&](StepPlane& plane) { return plane.WaitStep(deadline, verdict); });
  if (status.ok()) Over(*verdict);
  return status;
}

Status Trainer::WaitBucket(uint32_t bucket, const Deadline& deadline) {
  return Waiting([&](StepPlane& plane) { return plane.WaitParameters(bucket, deadline); });
}

Status Trainer::WaitBucketOnGpu(uint32_t bucket, StreamNumber stream, const Deadline& deadline) {
  return Waiting([&](StepPlane& plane) { return plane.plane().WaitOnStream(bucket, stream, deadline); });
}

Status Trainer::Receive(std::span<const superoffload_range> ranges, std::span<uint64_t> digests,
                        std::span<uint8_t> received, const Deadline& deadline) {
  return Waiting([&](StepPlane& plane) -> Status {
    std::vector<bool> final(plane.bucket_count());
    for (;;) {
      std::vector<superoffload_range> ready;
      std::vector<size_t> parameters;
      bool complete = true;
      for (size_t i = 0; i < ranges.size(); ++i) {
        if (received[i] != 0) continue;
        const ParameterPlace& place = layout_.parameter(i);
        const auto first = final.begin() + place.first_bucket;
        if (std::find(first, first + place.bucket_count, false) == first + place.bucket_count) {
          ready.push_back(ranges[i]);
          parameters.push_back(i);
        } else {
          complete = false;
        }
      }
      std::vector<uint64_t> theirs(ready.size());
      CopyAndDigest(ready, threads_, theirs);
      for (size_t i = 0; i < ready.size(); ++i) {
        digests[parameters[i]] = theirs[i];
        received[parameters[i]] = 1;
      }
      if (complete) return {};
      if (Status status = plane.WaitMoreParameters(deadline, &final); !status.ok()) return status;
    }
  });
}

void Trainer::Over(const superoffload_verdict& verdict) {
  const std::lock_guard lock(mutex_);
  if (!step_.ended()) return;  // it was over before
  if (step_.end->kind != StepEnd::Kind::kAbandon) expected_scale_ = step_.end->gradient_scale;
  slot_ = verdict.next_slot % 2;
  committed_steps_ = verdict.committed_steps;
  Reset();
}

uint64_t Trainer::committed_steps() const {
  const std::lock_guard lock(mutex_);
  return committed_steps_;
}

Status Trainer::Arrived(std::span<uint64_t> elements) const {
  const std::lock_guard lock(mutex_);
  std::ranges::copy_n(step_.arrived().begin(), std::min(elements.size(), step_.arrived().size()), elements.begin());
  return fault_;
}

Status Trainer::Fail(Status status) {
  const std::lock_guard lock(mutex_);
  if (fault_.ok()) fault_ = status;
  return status;
}

Status Trainer::FindEdited(std::span<const GradientPiece> pieces, size_t* index) const {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckUsed(); !status.ok()) return status;
  std::vector<superoffload_range> ranges;
  for (const GradientPiece& piece : pieces) {
    const bool came = piece.parameter < layout_.parameter_count() &&
                      piece.elements <= step_.arrived()[piece.parameter] &&
                      piece.dtype == layout_.parameter(piece.parameter).gradient_dtype;
    const void* const there = came ? mover_->Where(piece, {}, slot_) : nullptr;
    if (there == nullptr) return Error(Code::kInvalidArgument, "a gradient that was not handed over is compared");
    ranges.push_back({piece.data, const_cast<void*>(there), piece.elements * kernels::DTypeBytes(piece.dtype)});
  }
  *index = FindDifference(ranges, threads_);
  return {};
}

void Trainer::Look(superoffload_open_step_state* step) const {
  const std::lock_guard lock(mutex_);
  *step = {.begun = step_.begun.has_value(),
           .prepared = step_.undecided(),
           .ended = step_.ended(),
           .gone = !gone_.ok(),
           .lost = lost_,
           .next_slot = slot_,
           .committed_steps = committed_steps_,
           .steps = steps_,
           .skips = {},
           .verdict = verdict_,
           .stall_seconds = plane_ == nullptr ? 0 : plane_->plane().stall_seconds()};
  std::ranges::copy(skips_, step->skips);
}

Status Trainer::OnGpu(const std::function<Status(GpuGradients&)>& call) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckUsed(); !status.ok()) return status;
  if (mover_->gpu() != nullptr) return call(*mover_->gpu());
  return Error(Code::kFailedPrecondition, "the optimizer's parameters are on the CPU");
}

Status Trainer::Publish(std::span<void* const> to, std::optional<StreamNumber> stream) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckUsed(); !status.ok()) return status;
  if (Status status = mover_->Check({.stream = stream}); !status.ok()) return status;
  return mover_->Publish(to, stream);
}

std::optional<uint32_t> Trainer::FindChanged(std::span<const GradientPiece> values) const {
  const std::lock_guard lock(mutex_);
  return FindChangedBy(values, [this](const auto& ranges) { return FindDifference(ranges, threads_); });
}

std::optional<uint32_t> Trainer::FindChangedInSamples(std::span<const GradientPiece> values) const {
  const std::lock_guard lock(mutex_);
  return FindChangedBy(
      values, [this](const auto& ranges) { return FindDifferenceInSamples(ranges, threads_, committed_steps_); });
}

// Pieces whose gradient has come are not compared: the daemon may be changing those parameters.
template <typename Find>
std::optional<uint32_t> Trainer::FindChangedBy(std::span<const GradientPiece> values, Find find) const {
  if (!CheckTaking().ok() || mover_->gpu() != nullptr || !gone_.ok() || lost_) return std::nullopt;
  const char* published = static_cast<const char*>(plane_->parameters().data());
  std::vector<superoffload_range> ranges;
  std::vector<uint32_t> parameters;
  for (const GradientPiece& piece : values) {
    if (!step_.Check(piece).ok()) continue;  // the call that hands it over tells
    const ParameterPlace& place = layout_.parameter(piece.parameter);
    const uint64_t bytes = kernels::DTypeBytes(place.dtype);
    const char* there = published + place.parameters_offset + piece.first * bytes;
    ranges.push_back({piece.data, const_cast<char*>(there), piece.elements * bytes});
    parameters.push_back(piece.parameter);
  }
  const size_t found = find(ranges);
  if (found == ranges.size()) return std::nullopt;
  return parameters[found];
}

}  // namespace superoffload::client
