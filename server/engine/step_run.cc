// What a run of several ranks adds to a step: it is prepared before anybody may commit it, and a prepared step waits
// for its run. README.md has the protocol and why it is enough.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "server/engine/step_machine.h"

namespace superoffload::engine {

absl::Status StepMachine::PrepareStep(uint64_t step, double gradient_scale, double max_grad_norm) {
  const CheckScope scope(name_, step);
  if (absl::Status status = CheckEnd(step, "PREPARE", gradient_scale, max_grad_norm); !status.ok()) return status;
  if (open_->preparing) {
    return absl::AlreadyExistsError(absl::StrCat("step ", step, " is being prepared; prepare each step once"));
  }
  open_->preparing = true;
  open_->gradient_scale = gradient_scale;
  open_->max_grad_norm = max_grad_norm;
  Proceed();
  return absl::OkStatus();
}

// The record's entries of the step replace those of the step before the last one, which every bucket has absorbed: each
// was submitted, into the slot in which that gradient lay.
void StepMachine::MaybePrepare() {
  if (!open_->preparing || open_->prepared || open_->ended || open_->measured < buckets_.size()) return;
  record_.Prepare(Values(open_->gradient_scale), {open_->absent, LoggedBuckets()}, open_->max_grad_norm);
  open_->prepared = true;
  if (sink_ != nullptr) sink_->Prepared(statistics_.step, record_.attempt(), SumOfSquares());
}

absl::Status StepMachine::EndPreparedStep(uint64_t step, double gradient_scale, double max_grad_norm,
                                          const RunTotal& total) {
  const CheckScope scope(name_, step);
  if (absl::Status status = CheckEnd(step, "END_STEP", gradient_scale, max_grad_norm); !status.ok()) return status;
  if (!open_->prepared) {
    return absl::FailedPreconditionError(absl::StrCat("END_STEP of step ", step,
                                                      " with a total, but the step is not prepared; prepare it and "
                                                      "gather its sum first"));
  }
  if (total.attempt != record_.attempt()) {
    return absl::FailedPreconditionError(absl::StrCat("END_STEP of attempt ", total.attempt, " at step ", step,
                                                      " but attempt ", record_.attempt(), " is prepared"));
  }
  if (!(OpenTerms(0) == Record::RunTerms{0, gradient_scale, max_grad_norm})) {
    return absl::InvalidArgumentError(absl::StrCat(
        "END_STEP of step ", step, " has another gradient scale or max_grad_norm than it was prepared with"));
  }
  open_->total = total.sum_of_squares;
  End();
  return absl::OkStatus();
}

Record::RunTerms StepMachine::OpenTerms(double sum_of_squares) const {
  return {sum_of_squares, open_->gradient_scale, open_->max_grad_norm};
}

// A step that is parked is over for this engine once its passes have ended; whether it speculated does not matter.
void StepMachine::MaybePark() {
  if (!open_ || !open_->parked || in_flight_ > absorbing_) return;
  open_.reset();
  for (Bucket& bucket : buckets_) bucket.phase = Phase::kFinal;
  early_ = static_cast<uint32_t>(buckets_.size());
}

absl::Status StepMachine::CheckNotPrepared(const char* call) const {
  const std::optional<Record::Prepared> prepared = record_.prepared();
  if (!prepared) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(call, " while step ", prepared->step,
                                                    " is prepared, which other ranks of the run may have committed; "
                                                    "start the run's trainers anew, which agree on it"));
}

// What is told must stay true until the ranks have agreed: no step is open that could still be prepared or end.
absl::StatusOr<RunReport> StepMachine::Report() const {
  if (absl::Status status = CheckNoStepOpen("a report"); !status.ok()) return status;
  return RunReport{record_.lineage(), record_.committed(), record_.last_terms(), record_.prepared()};
}

absl::Status StepMachine::CheckAgreement(const char* call, uint64_t attempt) const {
  if (absl::Status status = CheckNoStepOpen(call); !status.ok()) return status;
  const std::optional<Record::Prepared> prepared = record_.prepared();
  if (prepared && prepared->attempt == attempt) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(call, " of attempt ", attempt, ", which is not prepared; let all ranks report and agree again"));
}

absl::Status StepMachine::CommitPrepared(uint64_t attempt, const Record::RunTerms& terms, std::function<void()> done) {
  if (absl::Status status = CheckAgreement("committing a prepared step", attempt); !status.ok()) return status;
  const Record::RunTerms own = record_.prepared()->terms;
  VerdictReport report;
  DecideBySum(terms, report);
  if (terms.gradient_scale != own.gradient_scale || terms.max_grad_norm != own.max_grad_norm ||
      IsSkip(report.verdict)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step ", record_.prepared()->step, " was prepared with gradient scale ", own.gradient_scale,
        " and max_grad_norm ", own.max_grad_norm, " but committed elsewhere with ", terms.gradient_scale, " and ",
        terms.max_grad_norm, ", total ", terms.sum_of_squares, "; restore all ranks from one checkpoint"));
  }
  Maintain({Passes(PassKind::kAbsorb), CommitPreparedStage(terms, report), Passes(PassKind::kAbsorb),
            Passes(PassKind::kPublishMasters), MarkPublishedStage(), [this, report] { TellResolved(report); }},
           std::move(done));
  return absl::OkStatus();
}

StepMachine::Stage StepMachine::CommitPreparedStage(const Record::RunTerms& terms, const VerdictReport& report) {
  return [this, terms, report] {
    record_.CommitPrepared(terms.sum_of_squares, report.clip_coefficient);
    const uint64_t t = ++statistics_.committed_steps;
    statistics_.step = std::max(statistics_.step, t);  // a daemon that was restarted has not counted the attempt
    TermsOf(t) = StepTerms(layout_->algorithm, record_.Values(t));
    for (uint32_t i = 0; i < buckets_.size(); ++i) SetPending(i, t);
    CountVerdict(report.verdict);
  };
}

absl::Status StepMachine::AbandonPrepared(uint64_t attempt) {
  if (absl::Status status = CheckAgreement("abandoning a prepared step", attempt); !status.ok()) return status;
  record_.DropPrepared();
  CountVerdict(Verdict::kSkipAbandoned);
  TellResolved({.verdict = Verdict::kSkipAbandoned, .global_norm = std::numeric_limits<double>::quiet_NaN()});
  return absl::OkStatus();
}

void StepMachine::TellResolved(VerdictReport report) const {
  report.step = statistics_.step;
  report.committed_steps = statistics_.committed_steps;
  report.next_slot = statistics_.next_slot();
  report.consecutive_skips = statistics_.consecutive_skips;
  StepReport step{
      .verdict = report, .buckets = static_cast<uint32_t>(buckets_.size()), .end_time = platform_.clock->Now()};
  for (const BucketLayout& bucket : layout_->buckets) {
    step.gradient_bytes += bucket.gradient_bytes();
    if (!IsSkip(report.verdict)) step.published_bytes += bucket.parameters_bytes();
  }
  step.by_agreement = true;
  observer_->OnStep(step);
}

}  // namespace superoffload::engine
