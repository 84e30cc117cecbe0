// The verdict on a step: what it is, and what is left to do then.
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/base/check.h"
#include "server/engine/step_machine.h"

namespace superoffload::engine {
namespace {

// Beyond this norm a squared gradient may overflow a second moment in fp32, from which no algorithm recovers.
constexpr double kMaxNorm = 0x1p63;

// torch.nn.utils.clip_grad_norm_.
constexpr double kClipEpsilon = 1e-6;

}  // namespace

double StepMachine::SumOfSquares() const {
  double sum = 0;
  for (const Bucket& bucket : buckets_) sum += *bucket.sum_of_squares;
  return sum;
}

void StepMachine::MaybeAnswerNorm() {
  if (!open_->norm_scale || open_->measured < buckets_.size()) return;
  const double norm = std::sqrt(SumOfSquares()) * std::abs(*open_->norm_scale);
  open_->norm_scale.reset();
  if (sink_ != nullptr) sink_->NormMeasured(statistics_.step, norm, SumOfSquares());
}

void StepMachine::MaybeDecide() {
  if (open_->verdict) return;
  if (open_->abandoned ? in_flight_ > absorbing_ : !open_->ended || open_->measured < buckets_.size()) return;
  const VerdictReport report = Decide();
  if (IsSkip(report.verdict) && in_flight_ > absorbing_) return;  // what speculates would be published after it
  if (!IsSkip(report.verdict) && !LogsHaveRoom()) return;
  open_->verdict = report;
  CountVerdict(open_->verdict->verdict);
  ApplyVerdict();
}

// Once the step is committed, that is for the gradient of the next one, which may land from the verdict on.
bool StepMachine::LogsHaveRoom() {
  bool room = true;
  for (uint32_t i = 0; layout_->has_logs && i < buckets_.size(); ++i) {
    const Bucket& bucket = buckets_[i];
    if (bucket.landing != Landing::kLog || bucket.pending == 0) continue;
    if (statistics_.committed_steps + 2 - bucket.first_pending < layout_->buckets[i].log_slots) continue;
    room = false;
    if (!bucket.absorbing) due_.insert(i);
  }
  if (!room) HurryAbsorbing();
  return room;
}

VerdictReport StepMachine::Decide() const {
  VerdictReport report;
  report.step = statistics_.step;
  if (open_->abandoned) {
    report.verdict = Verdict::kSkipAbandoned;
    report.global_norm = std::numeric_limits<double>::quiet_NaN();
    return report;
  }
  DecideBySum(OpenTerms(open_->total ? *open_->total : SumOfSquares()), report);
  return report;
}

// A function of the terms alone, so that all ranks of a run come to the same.
void StepMachine::DecideBySum(const Record::RunTerms& terms, VerdictReport& report) {
  report.global_norm = std::sqrt(terms.sum_of_squares) * std::abs(terms.gradient_scale);
  if (!std::isfinite(terms.sum_of_squares)) {
    report.verdict = Verdict::kSkipNonFinite;
  } else if (report.global_norm >= kMaxNorm) {
    report.verdict = Verdict::kSkipOverflow;
  } else if (terms.max_grad_norm > 0 && terms.max_grad_norm / (report.global_norm + kClipEpsilon) < 1) {
    report.verdict = Verdict::kClip;
    report.clip_coefficient = terms.max_grad_norm / (report.global_norm + kClipEpsilon);
  }
}

void StepMachine::CountVerdict(Verdict verdict) {
  switch (verdict) {
    case Verdict::kCommit:
      ++statistics_.commits;
      break;
    case Verdict::kClip:
      ++statistics_.clips;
      break;
    case Verdict::kSkipNonFinite:
      ++statistics_.skips_non_finite;
      break;
    case Verdict::kSkipOverflow:
      ++statistics_.skips_overflow;
      break;
    case Verdict::kSkipAbandoned:
      ++statistics_.skips_abandoned;
      break;
  }
  statistics_.consecutive_skips = IsSkip(verdict) ? statistics_.consecutive_skips + 1 : 0;
}

void StepMachine::ApplyVerdict() {
  SUPEROFFLOAD_CHECK(open_->abandoned || (open_->ended && open_->measured == buckets_.size()), "a verdict on ",
                     open_->measured, " of ", buckets_.size(), " buckets");
  VerdictReport& report = *open_->verdict;
  const bool skip = IsSkip(report.verdict);
  StepValues applied = Values(open_->gradient_scale * report.clip_coefficient);
  report.speculation_stands = !skip && applied == open_->speculative.values();
  if (!open_->abandoned) predictor_.Learn(report.speculation_stands);
  if (skip && open_->prepared) record_.DropPrepared();
  if (!skip) {
    // From here on the step outlives the daemon.
    if (open_->prepared) {
      record_.CommitPrepared(*open_->total, report.clip_coefficient);
    } else {
      record_.Commit(applied, {open_->absent, LoggedBuckets()});
    }
    ++statistics_.committed_steps;
    TermsOf(statistics_.committed_steps) = StepTerms(layout_->algorithm, std::move(applied));
  }
  DropPasses();  // what has not begun begins anew, as the verdict has it
  early_ = static_cast<uint32_t>(buckets_.size());
  for (uint32_t i = static_cast<uint32_t>(buckets_.size()); i-- > 0;) {
    Bucket& bucket = buckets_[i];
    if (bucket.phase == Phase::kSpeculated) ++report.speculated_buckets;
    if (bucket.phase == Phase::kSpeculating) {
      ++open_->to_finish;  // its pass goes on, and FinishSpeculation does the rest
    } else if (bucket.phase == Phase::kSpeculated && report.speculation_stands) {
      SetPending(i, statistics_.committed_steps);
      bucket.phase = Phase::kFinal;
      record_.MarkPublished(i);
    } else if (!skip && bucket.landing == Landing::kLog) {
      SetPending(i, statistics_.committed_steps);
      bucket.phase = Phase::kFinal;
      const uint64_t every = layout_->buckets[i].log_slots - 1;  // one slot is for the step to come
      if ((statistics_.committed_steps + i) % every == 0) due_.insert(i);
    } else if (bucket.phase == Phase::kSpeculated) {
      bucket.phase = Phase::kUndoing;
      Enqueue(i);
      ++open_->to_finish;
      ++report.republished_buckets;
    } else if (!skip) {
      if (layout_->in_place) SetPending(i, statistics_.committed_steps);
      bucket.phase = Phase::kUpdating;
      Enqueue(i);
      ++open_->to_finish;
    }
  }
  statistics_.speculated_buckets += report.speculated_buckets;
  statistics_.republished_buckets += report.republished_buckets;
  report.committed_steps = statistics_.committed_steps;
  report.next_slot = statistics_.next_slot();
  report.consecutive_skips = statistics_.consecutive_skips;
  if (sink_ != nullptr) sink_->VerdictReached(report);
  for (uint32_t i = 0; !skip && i < buckets_.size(); ++i) {  // who trains has them already
    if (buckets_[i].landing == Landing::kLog) TellPublished(i, /*speculative=*/false);
  }
  Advance();
  MaybeClose();
}

void StepMachine::MaybeClose() {
  if (!open_ || !open_->verdict || open_->to_finish > 0) return;
  StepReport report{.verdict = *open_->verdict,
                    .buckets = static_cast<uint32_t>(buckets_.size()),
                    .gradient_bytes = 0,
                    .published_bytes = open_->published_bytes,
                    .streamed_bytes = open_->streamed_bytes,
                    .receive_duration = open_->end_time - open_->begin_time,
                    .exposed_duration = absl::ZeroDuration(),
                    .end_time = platform_.clock->Now()};
  report.exposed_duration = report.end_time - open_->end_time;
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].phase == Phase::kAwaited) continue;
    report.gradient_bytes += layout_->buckets[i].gradient_bytes();
  }
  open_.reset();
  observer_->OnStep(report);
}

}  // namespace superoffload::engine
