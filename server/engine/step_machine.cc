#include "server/engine/step_machine.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace superoffload::engine {
namespace {

absl::Status CheckScale(double gradient_scale) {
  if (std::isfinite(gradient_scale) && gradient_scale != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("gradient scale is ", gradient_scale, " but must be finite and not 0"));
}

}  // namespace

StepMachine::Step::Step() = default;
StepMachine::Maintenance::Maintenance() = default;

StepMachine::StepMachine(const Layout* layout, std::vector<Scalars> groups, const OptimizerMemory& memory,
                         SpeculationPolicy policy, Platform platform, StepObserver* observer,
                         std::function<void(uint32_t)> pass_done)
    : layout_(layout),
      memory_(memory),
      record_(memory.record, *layout, platform.deaths),
      platform_(platform),
      observer_(observer),
      pass_done_(std::move(pass_done)),
      groups_(std::move(groups)),
      committed_terms_(layout->kept_steps),
      predictor_(policy),
      buckets_(layout->buckets.size()) {
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    buckets_[i].pass = std::make_unique<BucketPass>(i, *layout_, memory_, &record_, pass_done_);
  }
  statistics_.step = statistics_.committed_steps = record_.committed();
}

StepMachine::~StepMachine() = default;

void StepMachine::Detach() {
  sink_ = nullptr;  // nobody listens any more
  if (open_ && open_->prepared && !open_->ended) {
    open_->parked = true;
    DropPasses();
  } else if (open_ && !open_->ended) {
    Abandon();
  }
  Proceed();
}

absl::Status StepMachine::SetScalars(uint32_t group, uint32_t first, std::span<const double> values) {
  if (group >= groups_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group, " does not exist; the optimizer has ", groups_.size(), " groups"));
  }
  const kernels::Algorithm& algorithm = *layout_->algorithm;
  if (first > algorithm.scalars.size() || values.size() > algorithm.scalars.size() - first) {
    return absl::InvalidArgumentError(absl::StrCat("hyper-parameters ", first, " to ", first + values.size() - 1,
                                                   " of group ", group, " do not all exist; ",
                                                   std::string(algorithm.name), " has ", algorithm.scalars.size()));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (absl::Status status = ValidateScalar(algorithm.scalars[first + i], values[i]); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("group ", group, ": ", status.message()));
    }
  }
  if (open_ && (open_->ended || open_->preparing)) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", statistics_.step, open_->ended ? " has ended" : " is prepared",
                     "; set groups before END_STEP, and before the step is prepared, or "
                     "after it is final"));
  }
  std::copy(values.begin(), values.end(), groups_[group].begin() + first);
  return absl::OkStatus();
}

absl::Status StepMachine::BeginStep(uint64_t step, double gradient_scale) {
  const CheckScope scope(name_, step);
  SUPEROFFLOAD_CHECK(MayBegin(), "BEGIN_STEP between steps");
  if (absl::Status status = CheckNoStepOpen("BEGIN_STEP"); !status.ok()) return status;
  if (absl::Status status = CheckNotPrepared("BEGIN_STEP"); !status.ok()) return status;
  if (absl::Status status = CheckComplete(/*before_push=*/false); !status.ok()) return status;
  if (step != statistics_.step + 1) {
    return absl::FailedPreconditionError(absl::StrCat("BEGIN_STEP of step ", step, " but the next step is ",
                                                      statistics_.step + 1, "; attach again to learn the step"));
  }
  if (statistics_.committed_steps >= kMaxSteps) {
    return absl::FailedPreconditionError(absl::StrCat("BEGIN_STEP of step ", step, " but an optimizer commits at most ",
                                                      kMaxSteps, " steps; restore a checkpoint of fewer"));
  }
  if (absl::Status status = CheckScale(gradient_scale); !status.ok()) return status;
  record_.BeginAttempt();
  ++statistics_.step;
  open_.emplace();
  open_->begin_time = platform_.clock->Now();
  open_->speculate = predictor_.ShouldSpeculate();
  open_->speculative = StepTerms(layout_->algorithm, Values(gradient_scale));
  for (Bucket& bucket : buckets_) {
    bucket.phase = Phase::kAwaited;
    bucket.sum_of_squares.reset();
    bucket.landing = Landing::kSlot;
  }
  if (layout_->has_logs || layout_->has_one_slot) HurryAbsorbing();  // the step's gradients are about to need the room
  return absl::OkStatus();
}

absl::Status StepMachine::ParametersAbsent(uint64_t step, uint32_t first, uint32_t count) {
  if (absl::Status status = CheckStepOpen(step, "ABSENT"); !status.ok()) return status;
  const size_t parameters = layout_->placements.size();
  if (first > parameters || count > parameters - first) {
    return absl::InvalidArgumentError(absl::StrCat("parameters ", first, " to ", uint64_t{first} + count - 1,
                                                   " do not all exist; the optimizer has ", parameters));
  }
  for (uint32_t i = first; i < first + count; ++i) {
    const Placement& place = layout_->placements[i];
    for (uint32_t b = place.first_bucket; b < place.first_bucket + place.bucket_count; ++b) {
      if (buckets_[b].phase == Phase::kAwaited) continue;
      return absl::FailedPreconditionError(absl::StrCat("parameter ", i, " is absent from step ", step,
                                                        ", but its bucket ", b, " was submitted; say so before"));
    }
  }
  open_->absent.resize(parameters);
  std::fill_n(open_->absent.begin() + first, count, true);
  return absl::OkStatus();
}

absl::Status StepMachine::GradientReady(uint64_t step, uint32_t index, std::optional<double> sum_of_squares,
                                        Landing landing) {
  const CheckScope scope(name_, step);
  if (absl::Status status = CheckStepOpen(step, "GRADIENT_READY"); !status.ok()) return status;
  if (index >= buckets_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", index, " does not exist; the plan has ", buckets_.size(), " buckets"));
  }
  Bucket& bucket = buckets_[index];
  if (bucket.phase != Phase::kAwaited) {
    return absl::AlreadyExistsError(
        absl::StrCat("bucket ", index, " was already submitted in step ", step, "; submit each bucket once per step"));
  }
  if (absl::Status status = CheckLanding(index, sum_of_squares.has_value(), landing); !status.ok()) return status;
  bucket.phase = Phase::kQueued;
  bucket.landing = landing;
  if (sum_of_squares) SetSum(bucket, *sum_of_squares);
  ++open_->arrived;
  Enqueue(index);
  Advance();
  AbsorbEarly();
  return absl::OkStatus();
}

absl::Status StepMachine::CheckLanding(uint32_t index, bool sum_known, Landing landing) const {
  const BucketLayout& layout = layout_->buckets[index];
  const Bucket& bucket = buckets_[index];
  const bool logs = landing == Landing::kLog;
  if (logs && layout.log_slots == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", index, " was submitted into its log, but has none; create the optimizer with logs"));
  }
  if (logs && !sum_known) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", index, " was submitted into its log without its sum of squares; give the sum"));
  }
  if (bucket.pending == 0) return absl::OkStatus();
  if (HasLoggedPending(index) != logs) {
    return absl::FailedPreconditionError(absl::StrCat(
        "bucket ", index, " was submitted into ", logs ? "its log while a slot has" : "a slot while its log has",
        " a gradient that is not absorbed; settle the optimizer in between"));
  }
  if (layout.one_slot()) {
    return absl::FailedPreconditionError(absl::StrCat("bucket ", index, " was submitted into its only slot, whose ",
                                                      "gradient of step ", bucket.pending,
                                                      " is not absorbed; wait until the slot is free"));
  }
  if (logs && bucket.first_pending + layout.log_slots <= statistics_.committed_steps + 1) {
    return absl::FailedPreconditionError(absl::StrCat("bucket ", index, " was submitted into a slot of its log whose ",
                                                      "gradient of step ", bucket.first_pending,
                                                      " is not absorbed; wait until the slot is free"));
  }
  return absl::OkStatus();
}

absl::Status StepMachine::EndStep(uint64_t step, double gradient_scale, double max_grad_norm, uint64_t streamed_bytes) {
  const CheckScope scope(name_, step);
  if (absl::Status status = CheckEnd(step, "END_STEP", gradient_scale, max_grad_norm); !status.ok()) return status;
  if (totals_required_ || open_->preparing) {
    return absl::FailedPreconditionError(
        absl::StrCat("END_STEP of step ", step,
                     " without a total, in a run of several ranks; prepare the step, gather "
                     "the sums of all ranks and end it with their total"));
  }
  open_->gradient_scale = gradient_scale;
  open_->max_grad_norm = max_grad_norm;
  open_->streamed_bytes = streamed_bytes;
  End();
  return absl::OkStatus();
}

absl::Status StepMachine::CheckEnd(uint64_t step, const char* call, double gradient_scale, double max_grad_norm) const {
  if (absl::Status status = CheckStepOpen(step, call); !status.ok()) return status;
  if (absl::Status status = CheckScale(gradient_scale); !status.ok()) return status;
  if (!(max_grad_norm >= 0)) {  // infinity is no clipping, as in torch
    return absl::InvalidArgumentError(
        absl::StrCat("max_grad_norm is ", max_grad_norm, " but must be at least 0; 0 means no clipping"));
  }
  return CheckAllSubmitted(call);
}

void StepMachine::End() {
  open_->ended = true;
  open_->end_time = platform_.clock->Now();
  Proceed();
}

absl::Status StepMachine::AbandonStep(uint64_t step) {
  if (absl::Status status = CheckStepOpen(step, "ABANDON_STEP"); !status.ok()) return status;
  if (absl::Status status = CheckNotPrepared("ABANDON_STEP"); !status.ok()) return status;
  Abandon();
  return absl::OkStatus();
}

absl::Status StepMachine::MeasureNorm(uint64_t step, double gradient_scale) {
  if (absl::Status status = CheckStepOpen(step, "MEASURE_NORM"); !status.ok()) return status;
  if (absl::Status status = CheckScale(gradient_scale); !status.ok()) return status;
  if (absl::Status status = CheckAllSubmitted("MEASURE_NORM"); !status.ok()) return status;
  open_->norm_scale = gradient_scale;
  MaybeAnswerNorm();
  return absl::OkStatus();
}

absl::Status StepMachine::CheckStepOpen(uint64_t step, const char* call) const {
  if (!open_ || open_->ended) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " of step ", step, " without an open step; begin it first"));
  }
  if (step != statistics_.step) {
    return absl::FailedPreconditionError(
        absl::StrCat(call, " of step ", step, " but step ", statistics_.step, " is open"));
  }
  return absl::OkStatus();
}

absl::Status StepMachine::CheckAllSubmitted(const char* call) const {
  if (open_->arrived == buckets_.size()) return absl::OkStatus();
  uint32_t missing = 0;
  while (buckets_[missing].phase != Phase::kAwaited) ++missing;
  return absl::FailedPreconditionError(absl::StrCat(
      call, " of step ", statistics_.step, " with ", buckets_.size() - open_->arrived, " of ", buckets_.size(),
      " buckets missing, the first being bucket ", missing, "; submit every bucket or abandon the step"));
}

absl::Status StepMachine::CheckNoStepOpen(const char* call) const {
  if (open_) {
    return absl::FailedPreconditionError(absl::StrCat(call, " while step ", statistics_.step,
                                                      " is open; end or abandon it and wait for its parameters"));
  }
  return absl::OkStatus();
}

StepValues StepMachine::Values(double gradient_scale) const {
  StepValues values{.gradient_scale = gradient_scale, .scalars = {}};
  for (const Scalars& group : groups_) values.scalars.insert(values.scalars.end(), group.begin(), group.end());
  return values;
}

std::optional<kernels::StepConstants> StepMachine::Committed(uint64_t t, uint32_t group, uint32_t parameter) {
  if (!record_.Had(t, parameter)) return std::nullopt;
  return TermsOf(t).Of(group, record_.ParameterSteps(t, parameter));
}

std::optional<kernels::StepConstants> StepMachine::Speculative(uint32_t group, uint32_t parameter) {
  if (!open_->absent.empty() && open_->absent[parameter]) return std::nullopt;
  return open_->speculative.Of(group, record_.ParameterSteps(statistics_.committed_steps, parameter) + 1);
}

bool StepMachine::HasLoggedPending(uint32_t index) const {
  const Bucket& bucket = buckets_[index];
  return bucket.pending != 0 && record_.Logged(bucket.pending, index);
}

void StepMachine::SetPending(uint32_t index, uint64_t t) {
  Bucket& bucket = buckets_[index];
  if (bucket.pending == 0) bucket.first_pending = t;
  bucket.pending = t;
  if (layout_->buckets[index].one_slot() && !layout_->in_place) due_.insert(index);
}

std::vector<bool> StepMachine::LoggedBuckets() const {
  if (!layout_->has_logs) return {};
  std::vector<bool> logged(buckets_.size());
  for (size_t i = 0; i < logged.size(); ++i) logged[i] = buckets_[i].landing == Landing::kLog;
  return logged;
}

void StepMachine::Abandon() {
  open_->abandoned = true;
  DropPasses();
  End();
}

void StepMachine::DropPasses() {
  ready_.clear();
  held_.clear();
  gate_.ForgetAwaited();
}

}  // namespace superoffload::engine
