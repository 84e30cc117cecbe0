#include "server/engine/step_engine.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/recovery.h"

namespace superoffload::engine {

using transport::Verdict;
using transport::VerdictReport;

namespace {

// Two keep every worker busy while one bucket drains, and leave the choice of the next pass as late as possible.
constexpr uint32_t kMaxPassesInFlight = 2;

// Beyond this norm a squared gradient may overflow v in fp32, from which Adam never recovers.
constexpr double kMaxNorm = 0x1p63;

// torch.nn.utils.clip_grad_norm_.
constexpr double kClipEpsilon = 1e-6;

absl::Status Incomplete(Incompleteness why) {
  if (why == Incompleteness::kNeverFilled) {
    return absl::DataLossError(
        "the optimizer is incomplete: its trainer ended before the first push_params or restore was whole; attach with "
        "push_params (the trainer's parameters win), restore a checkpoint, or delete the optimizer");
  }
  return absl::DataLossError(
      "the optimizer is incomplete: restoring a checkpoint failed or was cut off; restore one, or delete the optimizer");
}

absl::Status CheckScale(double gradient_scale) {
  if (std::isfinite(gradient_scale) && gradient_scale != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("gradient scale is ", gradient_scale, " but must be finite and not 0"));
}

}  // namespace

StepEngine::Step::Step() = default;

StepEngine::StepEngine(const Layout* layout, std::vector<kernels::AdamHyperparameters> groups,
                       const OptimizerMemory& memory, SpeculationPolicy policy, WorkerPool* pool,
                       StepObserver* observer)
    : layout_(layout),
      memory_(memory),
      record_(memory.record, groups.size(), layout->chunks),
      pool_(pool),
      observer_(observer),
      groups_(std::move(groups)),
      predictor_(policy),
      buckets_(layout->buckets.size()) {
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    buckets_[i].pass =
        std::make_unique<BucketPass>(i, *layout_, memory_, &record_, [this](uint32_t index) { OnPassDone(index); });
  }
  absl::MutexLock lock(&mu_);
  Recover();
}

StepEngine::~StepEngine() { Detach(); }

void StepEngine::Attach(transport::CompletionSink* sink) {
  absl::MutexLock lock(&mu_);
  sink_ = sink;
}

void StepEngine::Detach() {
  absl::MutexLock lock(&mu_);
  sink_ = nullptr;  // nobody listens any more
  if (open_ && !open_->ended) Abandon();
  mu_.Await(absl::Condition(this, &StepEngine::BetweenSteps));
}

absl::Status StepEngine::SetGroup(uint32_t group, const transport::GroupUpdate& update) {
  absl::MutexLock lock(&mu_);
  if (group >= groups_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group, " does not exist; the optimizer has ", groups_.size(), " groups"));
  }
  kernels::AdamHyperparameters hyperparameters{.lr = update.lr,
                                               .beta1 = update.beta1,
                                               .beta2 = update.beta2,
                                               .eps = update.eps,
                                               .weight_decay = update.weight_decay,
                                               .decay_form = groups_[group].decay_form};
  if (absl::Status status = ValidateHyperparameters(hyperparameters); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("group ", group, ": ", status.message()));
  }
  if (open_ && open_->ended) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", statistics_.step, " has ended; set groups before END_STEP or after the step is final"));
  }
  groups_[group] = hyperparameters;
  return absl::OkStatus();
}

absl::Status StepEngine::BeginStep(uint64_t step, double gradient_scale) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &StepEngine::MayBegin));
  if (absl::Status status = CheckNoStepOpen("BEGIN_STEP"); !status.ok()) return status;
  if (absl::Status status = Completeness(/*before_push=*/false); !status.ok()) return status;
  if (step != statistics_.step + 1) {
    return absl::FailedPreconditionError(absl::StrCat("BEGIN_STEP of step ", step, " but the next step is ",
                                                      statistics_.step + 1, "; attach again to learn the step"));
  }
  if (absl::Status status = CheckScale(gradient_scale); !status.ok()) return status;
  ++statistics_.step;
  open_.emplace();
  open_->begin_time = absl::Now();
  open_->speculate = predictor_.ShouldSpeculate();
  open_->speculative = StepConstants(gradient_scale);
  for (Bucket& bucket : buckets_) bucket.phase = Phase::kAbsent;
  return absl::OkStatus();
}

absl::Status StepEngine::GradientReady(uint64_t step, uint32_t index, std::optional<double> sum_of_squares) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckStepOpen(step, "GRADIENT_READY"); !status.ok()) return status;
  if (index >= buckets_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", index, " does not exist; the plan has ", buckets_.size(), " buckets"));
  }
  Bucket& bucket = buckets_[index];
  if (bucket.phase != Phase::kAbsent) {
    return absl::AlreadyExistsError(absl::StrCat("bucket ", index, " was already handed over in step ", step,
                                                 "; hand each bucket over once per step"));
  }
  bucket.phase = Phase::kQueued;
  bucket.stated_sum = sum_of_squares;
  ++open_->arrived;
  ready_.push_back(index);
  Advance();
  return absl::OkStatus();
}

absl::Status StepEngine::EndStep(uint64_t step, double gradient_scale, double max_grad_norm) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckStepOpen(step, "END_STEP"); !status.ok()) return status;
  if (absl::Status status = CheckScale(gradient_scale); !status.ok()) return status;
  if (!(max_grad_norm >= 0)) {  // infinity is no clipping, as in torch
    return absl::InvalidArgumentError(
        absl::StrCat("max_grad_norm is ", max_grad_norm, " but must be at least 0; 0 means no clipping"));
  }
  if (absl::Status status = CheckAllHandedOver("END_STEP"); !status.ok()) return status;
  open_->gradient_scale = gradient_scale;
  open_->max_grad_norm = max_grad_norm;
  open_->ended = true;
  open_->end_time = absl::Now();
  Proceed();
  return absl::OkStatus();
}

absl::Status StepEngine::AbandonStep(uint64_t step) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckStepOpen(step, "ABANDON_STEP"); !status.ok()) return status;
  Abandon();
  return absl::OkStatus();
}

absl::Status StepEngine::MeasureNorm(uint64_t step, double gradient_scale) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckStepOpen(step, "MEASURE_NORM"); !status.ok()) return status;
  if (absl::Status status = CheckScale(gradient_scale); !status.ok()) return status;
  if (absl::Status status = CheckAllHandedOver("MEASURE_NORM"); !status.ok()) return status;
  open_->norm_scale = gradient_scale;
  MaybeAnswerNorm();
  return absl::OkStatus();
}

absl::Status StepEngine::WaitSettled() { return Maintain("settling", std::nullopt); }

absl::Status StepEngine::WaitPushed() { return Maintain("pushing parameters", PassKind::kAdopt); }

// What was settled has nothing left to absorb, so that only the push itself is to be finished after a death.
void StepEngine::Push() {
  record_.BeginPush();
  RunMaintenance(PassKind::kAdopt);
  record_.EndPush();
}

absl::Status StepEngine::WaitPulled() { return Maintain("pulling parameters", PassKind::kRestore); }

absl::Status StepEngine::Maintain(const char* call, std::optional<PassKind> then) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &StepEngine::NotMaintained));
  if (absl::Status status = CheckNoStepOpen(call); !status.ok()) return status;
  if (then) {
    if (absl::Status status = Completeness(*then == PassKind::kAdopt); !status.ok()) return status;
  }
  RunMaintenance(PassKind::kSettle);
  if (then == PassKind::kAdopt) {
    Push();
  } else if (then) {
    RunMaintenance(*then);
  }
  maintenance_.reset();
  return absl::OkStatus();
}

void StepEngine::RunMaintenance(PassKind kind) {
  maintenance_ = kind;
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    if (kind != PassKind::kSettle || buckets_[i].pending) ready_.push_back(i);
  }
  Advance();
  mu_.Await(absl::Condition(this, &StepEngine::Idle));
}

absl::StatusOr<StepEngine::Moment> StepEngine::WaitSnapshot(uint64_t committed_steps,
                                                            const std::atomic<bool>& cancelled) {
  absl::MutexLock lock(&mu_);
  if (statistics_.committed_steps >= committed_steps) {
    if (gate_.closed()) {
      return absl::FailedPreconditionError("another checkpoint of the optimizer is being taken; wait for its end");
    }
    if (absl::Status status = Completeness(/*before_push=*/false); !status.ok()) return status;
  }
  const auto waiting = snapshots_due_.insert(committed_steps);
  const auto due = [this, &cancelled, committed_steps, restores = restores_] {
    mu_.AssertHeld();
    return cancelled || restores_ != restores ||
           (statistics_.committed_steps >= committed_steps && !gate_.closed() && record_.complete() && BetweenSteps());
  };
  const uint64_t restores = restores_;
  mu_.Await(absl::Condition(&due));
  snapshots_due_.erase(waiting);
  if (cancelled) return absl::CancelledError("the checkpoint was cancelled");
  if (restores_ != restores) return absl::AbortedError("the optimizer was restored; take the checkpoint again");
  RunMaintenance(PassKind::kSettle);
  maintenance_.reset();
  gate_.Close(static_cast<uint32_t>(buckets_.size()));
  return Moment{statistics_, groups_};
}

std::optional<uint32_t> StepEngine::ClaimSnapshotBucket() {
  absl::MutexLock lock(&mu_);
  return gate_.Claim();
}

void StepEngine::BucketSaved(uint32_t bucket) {
  absl::MutexLock lock(&mu_);
  if (gate_.Saved(bucket)) ready_.push_front(bucket);
  Proceed();
}

void StepEngine::EndSnapshot() {
  absl::MutexLock lock(&mu_);
  for (const uint32_t bucket : gate_.Open()) ready_.push_back(bucket);
  Proceed();
}

void StepEngine::WakeSnapshot() {
  absl::MutexLock lock(&mu_);  // whoever waits looks at its condition again when this is released
}

absl::Status StepEngine::WaitRestored(const Moment& moment, const std::function<absl::Status()>& load) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &StepEngine::BetweenSteps));
  if (gate_.closed()) {
    return absl::FailedPreconditionError("a checkpoint of the optimizer is being taken; wait for its end");
  }
  maintenance_ = PassKind::kRestore;
  for (Bucket& bucket : buckets_) bucket.pending.reset();
  record_.BeginRestore();
  mu_.Unlock();  // loading takes long; nobody touches the state during maintenance
  const absl::Status status = load();
  mu_.Lock();
  if (status.ok()) {
    record_.EndRestore(moment.statistics.committed_steps);
    groups_ = moment.groups;
    statistics_ = {};
    statistics_.step = statistics_.committed_steps = moment.statistics.committed_steps;
    ++restores_;
    RunMaintenance(PassKind::kRestore);
  }
  maintenance_.reset();
  return status;
}

void StepEngine::AwaitFirstFill() {
  absl::MutexLock lock(&mu_);
  record_.MarkNeverFilled();
}

absl::Status StepEngine::CheckComplete(bool before_push) const {
  absl::MutexLock lock(&mu_);
  return Completeness(before_push);
}

absl::Status StepEngine::Completeness(bool before_push) const {
  const Incompleteness why = record_.incompleteness();
  const bool pushable = why == Incompleteness::kNeverFilled || why == Incompleteness::kPushing;
  return record_.complete() || (before_push && pushable) ? absl::OkStatus() : Incomplete(why);
}

Incompleteness StepEngine::incompleteness() const {
  absl::MutexLock lock(&mu_);
  return record_.incompleteness();
}

void StepEngine::SetPolicy(SpeculationPolicy policy) {
  absl::MutexLock lock(&mu_);
  predictor_.set_policy(policy);
}

SpeculationPolicy StepEngine::policy() const {
  absl::MutexLock lock(&mu_);
  return predictor_.policy();
}

std::vector<kernels::AdamHyperparameters> StepEngine::groups() const {
  absl::MutexLock lock(&mu_);
  return groups_;
}

StepStatistics StepEngine::statistics() const {
  absl::MutexLock lock(&mu_);
  return statistics_;
}

absl::Status StepEngine::CheckStepOpen(uint64_t step, const char* call) const {
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

absl::Status StepEngine::CheckAllHandedOver(const char* call) const {
  if (open_->arrived == buckets_.size()) return absl::OkStatus();
  uint32_t missing = 0;
  while (buckets_[missing].phase != Phase::kAbsent) ++missing;
  return absl::FailedPreconditionError(absl::StrCat(
      call, " of step ", statistics_.step, " with ", buckets_.size() - open_->arrived, " of ", buckets_.size(),
      " buckets missing, the first being bucket ", missing, "; hand every bucket over or abandon the step"));
}

absl::Status StepEngine::CheckNoStepOpen(const char* call) const {
  if (open_) {
    return absl::FailedPreconditionError(absl::StrCat(call, " while step ", statistics_.step,
                                                      " is open; end or abandon it and wait for its parameters"));
  }
  return absl::OkStatus();
}

std::vector<kernels::AdamStep> StepEngine::StepConstants(double gradient_scale) const {
  std::vector<kernels::AdamStep> constants;
  constants.reserve(groups_.size());
  for (const kernels::AdamHyperparameters& group : groups_) {
    constants.push_back(kernels::MakeAdamStep(group, statistics_.committed_steps + 1, gradient_scale));
  }
  return constants;
}

PendingGradient StepEngine::Committed(uint32_t bucket) const {
  const uint64_t t = statistics_.committed_steps;
  return {.step = record_.Constants(t, layout_->buckets[bucket].group), .slot = SlotOf(t), .t = t};
}

void StepEngine::Recover() {
  statistics_.step = statistics_.committed_steps = record_.committed();
  if (record_.complete() && record_.committed() > 0) AbsorbCommitted(*layout_, memory_, record_, *pool_);
  if (record_.incompleteness() == Incompleteness::kPushing) Push();
  maintenance_.reset();
}

void StepEngine::Abandon() {
  open_->abandoned = true;
  open_->ended = true;
  open_->end_time = absl::Now();
  ready_.clear();
  gate_.ForgetAwaited();
  MaybeDecide();
}

void StepEngine::Advance() {
  while (!ready_.empty() && in_flight_ < kMaxPassesInFlight) {
    const uint32_t index = ready_.front();
    ready_.pop_front();
    if (IsNormed(buckets_[index])) {
      buckets_[index].phase = Phase::kNormed;
      ++open_->measured;
    } else if (MustKeepState(index)) {
      gate_.Await(index);
    } else {
      StartPass(index);
    }
  }
}

bool StepEngine::Speculates(const Bucket& bucket) const {
  return open_->speculate && !Hurry() && std::isfinite(bucket.stated_sum.value_or(0));
}

// Whether a bucket that has just arrived needs no pass before the verdict.
bool StepEngine::IsNormed(const Bucket& bucket) const {
  return !maintenance_ && bucket.phase == Phase::kQueued && bucket.stated_sum && !Speculates(bucket);
}

// Whether the bucket's next pass might write state that a snapshot still has to save.
bool StepEngine::MustKeepState(uint32_t index) const {
  if (!gate_.Holds(index)) return false;
  return maintenance_
             ? *maintenance_ != PassKind::kRestore && (buckets_[index].pending || *maintenance_ == PassKind::kAdopt)
             : buckets_[index].phase != Phase::kUndoing && buckets_[index].pending.has_value();
}

void StepEngine::StartPass(uint32_t index) {
  Bucket& bucket = buckets_[index];
  const uint32_t group = layout_->buckets[index].group;
  PassArguments arguments;
  if (maintenance_) {
    arguments.kind = *maintenance_;
    arguments.absorb = bucket.pending;
  } else if (bucket.phase == Phase::kUndoing) {
    const bool skip = transport::IsSkip(open_->verdict->verdict);
    arguments.kind = skip ? PassKind::kRestore : PassKind::kRepublish;
    if (!skip) arguments.publish = {.step = open_->applied[group], .slot = SlotOf(statistics_.committed_steps), .t = 0};
  } else if (bucket.phase == Phase::kUpdating) {
    arguments.kind = PassKind::kUpdate;
    arguments.absorb = bucket.pending;
    arguments.publish = {.step = open_->applied[group], .slot = SlotOf(statistics_.committed_steps), .t = 0};
  } else {
    const bool speculate = Speculates(bucket);
    bucket.phase = speculate ? Phase::kSpeculating : Phase::kNorming;
    arguments.kind = speculate ? PassKind::kSpeculate : PassKind::kNorm;
    if (speculate) arguments.absorb = bucket.pending;
    arguments.publish = {.step = open_->speculative[group], .slot = statistics_.next_slot(), .t = 0};
  }
  ++in_flight_;
  bucket.pass->Start(*pool_, arguments);
}

void StepEngine::OnPassDone(uint32_t index) {
  absl::MutexLock lock(&mu_);
  --in_flight_;
  observer_->OnPass(buckets_[index].pass->report());
  if (maintenance_) {
    buckets_[index].pending.reset();
  } else {
    FinishPass(index);
  }
  Proceed();
}

void StepEngine::Proceed() {
  Advance();
  if (!open_) return;
  MaybeAnswerNorm();
  MaybeDecide();
  MaybeClose();
}

void StepEngine::FinishPass(uint32_t index) {
  Bucket& bucket = buckets_[index];
  switch (bucket.pass->arguments().kind) {
    case PassKind::kNorm:
      bucket.phase = Phase::kNormed;
      ++open_->measured;
      break;
    case PassKind::kSpeculate:
      Absorbed(index);
      bucket.phase = Phase::kSpeculated;
      ++open_->measured;
      ++open_->speculated;
      Publish(index, /*speculative=*/true);
      break;
    case PassKind::kUpdate:
      Absorbed(index);
      [[fallthrough]];
    case PassKind::kRepublish:
      bucket.pending = Committed(index);
      [[fallthrough]];
    case PassKind::kRestore:
      bucket.phase = Phase::kFinal;
      --open_->to_finish;
      Publish(index, /*speculative=*/false);
      break;
    case PassKind::kSettle:
    case PassKind::kAdopt:
      break;  // maintenance only
  }
}

void StepEngine::Publish(uint32_t index, bool speculative) {
  const BucketLayout& bucket = layout_->buckets[index];
  open_->published_bytes += bucket.elements * kernels::DTypeBytes(bucket.dtype);
  if (sink_ != nullptr) sink_->ParametersReady(statistics_.step, index, speculative);
}

void StepEngine::Absorbed(uint32_t index) {
  buckets_[index].pending.reset();
  if (sink_ != nullptr) sink_->SlotFree(statistics_.step, index);
}

double StepEngine::SumOfSquares() const {
  double sum = 0;
  for (const Bucket& bucket : buckets_) {
    sum += bucket.phase == Phase::kNormed && bucket.stated_sum ? *bucket.stated_sum : bucket.pass->sum_of_squares();
  }
  return sum;
}

void StepEngine::MaybeAnswerNorm() {
  if (!open_->norm_scale || open_->measured < buckets_.size()) return;
  const double norm = std::sqrt(SumOfSquares()) * std::abs(*open_->norm_scale);
  open_->norm_scale.reset();
  if (sink_ != nullptr) sink_->NormMeasured(statistics_.step, norm);
}

void StepEngine::MaybeDecide() {
  if (open_->verdict) return;
  if (open_->abandoned ? in_flight_ > 0 : !open_->ended || open_->measured < buckets_.size()) return;
  open_->verdict = Decide();
  CountVerdict(open_->verdict->verdict);
  ApplyVerdict();
}

VerdictReport StepEngine::Decide() {
  VerdictReport report;
  report.step = statistics_.step;
  report.speculated_buckets = open_->speculated;
  if (open_->abandoned) {
    report.verdict = Verdict::kSkipAbandoned;
    report.global_norm = std::numeric_limits<double>::quiet_NaN();
    return report;
  }
  const double sum_of_squares = SumOfSquares();
  report.global_norm = std::sqrt(sum_of_squares) * std::abs(open_->gradient_scale);
  if (!std::isfinite(sum_of_squares)) {
    report.verdict = Verdict::kSkipNonFinite;
  } else if (report.global_norm >= kMaxNorm) {
    report.verdict = Verdict::kSkipOverflow;
  } else if (open_->max_grad_norm > 0 && open_->max_grad_norm / (report.global_norm + kClipEpsilon) < 1) {
    report.verdict = Verdict::kClip;
    report.clip_coefficient = open_->max_grad_norm / (report.global_norm + kClipEpsilon);
  }
  return report;
}

void StepEngine::CountVerdict(Verdict verdict) {
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
  statistics_.consecutive_skips = transport::IsSkip(verdict) ? statistics_.consecutive_skips + 1 : 0;
}

void StepEngine::ApplyVerdict() {
  VerdictReport& report = *open_->verdict;
  const bool skip = transport::IsSkip(report.verdict);
  if (!skip) open_->applied = StepConstants(open_->gradient_scale * report.clip_coefficient);
  report.speculation_stands = !skip && open_->applied == open_->speculative;
  if (!open_->abandoned) predictor_.Learn(report.speculation_stands);
  if (!skip) {
    record_.Commit(open_->applied);  // from here on the step outlives the daemon
    ++statistics_.committed_steps;
  }
  // The next forward pass reads the last bucket first.
  for (uint32_t i = static_cast<uint32_t>(buckets_.size()); i-- > 0;) {
    Bucket& bucket = buckets_[i];
    if (bucket.phase == Phase::kSpeculated && report.speculation_stands) {
      bucket.pending = Committed(i);
      bucket.phase = Phase::kFinal;
    } else if (bucket.phase == Phase::kSpeculated) {
      bucket.phase = Phase::kUndoing;
      ready_.push_back(i);
      ++report.republished_buckets;
    } else if (!skip) {
      bucket.phase = Phase::kUpdating;
      ready_.push_back(i);
    }
  }
  open_->to_finish = static_cast<uint32_t>(ready_.size());
  statistics_.speculated_buckets += report.speculated_buckets;
  statistics_.republished_buckets += report.republished_buckets;
  report.committed_steps = statistics_.committed_steps;
  report.next_slot = statistics_.next_slot();
  report.consecutive_skips = statistics_.consecutive_skips;
  if (sink_ != nullptr) sink_->VerdictReached(report);
  Advance();
  MaybeClose();
}

void StepEngine::MaybeClose() {
  if (!open_ || !open_->verdict || open_->to_finish > 0) return;
  StepReport report{.verdict = *open_->verdict,
                    .buckets = static_cast<uint32_t>(buckets_.size()),
                    .gradient_bytes = 0,
                    .published_bytes = open_->published_bytes,
                    .receive_duration = open_->end_time - open_->begin_time,
                    .exposed_duration = absl::ZeroDuration(),
                    .end_time = absl::Now()};
  report.exposed_duration = report.end_time - open_->end_time;
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].phase == Phase::kAbsent) continue;
    report.gradient_bytes += layout_->buckets[i].elements * kernels::DTypeBytes(layout_->buckets[i].gradient_dtype);
  }
  open_.reset();
  observer_->OnStep(report);
}

}  // namespace superoffload::engine
