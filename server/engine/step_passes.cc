// What the passes of a step do, and when they start.
#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "kernels/base/check.h"
#include "server/engine/segments.h"
#include "server/engine/step_machine.h"

namespace superoffload::engine {
namespace {

// Two keep every worker busy while one bucket drains, and leave the choice of the next pass as late as possible.
constexpr uint32_t kMaxPassesInFlight = 2;

}  // namespace

void StepMachine::Advance() {
  std::erase_if(held_, [this](uint32_t index) { return TakeNorm(index); });
  if (one_at_a_time() && !ready_.empty()) HurryAbsorbing();
  while (!ready_.empty() && (one_at_a_time() ? in_flight_ == 0 : in_flight_ - absorbing_ < kMaxPassesInFlight)) {
    const uint32_t index = *ready_.begin();
    ready_.erase(ready_.begin());
    if (TakeNorm(index)) continue;
    if (buckets_[index].absorbing) {
      held_.push_back(index);
    } else if (MustKeepState(index)) {
      gate_.Await(index);
    } else if (AbsorbsFirst(index)) {
      StartAbsorbing(index, /*when_idle=*/false);
      held_.push_back(index);
    } else {
      StartPass(index);
    }
  }
}

bool StepMachine::TakeNorm(uint32_t index) {
  Bucket& bucket = buckets_[index];
  if (!IsNormed(bucket)) return false;
  bucket.phase = Phase::kNormed;
  return true;
}

void StepMachine::Enqueue(uint32_t index) {
  ready_.insert(index);
  if (buckets_[index].absorbing) platform_.pool->Hurry(buckets_[index].pass.get());
}

// The last bucket first: its next gradient comes last, and the next forward pass needs it first. Each bucket is looked
// at once per step; one that is on its way stops the others until it is there.
void StepMachine::AbsorbEarly() {
  if (maintenance_ || SnapshotDue() || sink_ == nullptr) return HurryAbsorbing();
  if (!platform_.pool->idle_work_is_free()) return;
  if (!open_ && predictor_.ShouldSpeculate()) return;  // the link is still busy with what the step has brought
  for (; early_ > 0 && absorbing_ < kMaxPassesInFlight; --early_) {
    if (one_at_a_time() && in_flight_ > 0) return;
    const uint32_t index = early_ - 1;
    Bucket& bucket = buckets_[index];
    const bool rests =
        bucket.phase == Phase::kAwaited || bucket.phase == Phase::kNormed || bucket.phase == Phase::kFinal;
    if (bucket.absorbing || gate_.Holds(index) || (open_ && !rests)) return;
    if (bucket.pending != 0 && !HasLoggedPending(index)) StartAbsorbing(index, /*when_idle=*/true);
  }
}

// A step whose gradients are on their way waits for room; one that has ended waits for parameters.
void StepMachine::AbsorbDue() {
  if (maintenance_ || (!open_ && (SnapshotDue() || sink_ == nullptr))) return;  // all is absorbed then
  const bool idle_is_free = platform_.pool->idle_work_is_free();
  if (!idle_is_free && open_ && open_->verdict && open_->to_finish > 0) return;
  const bool when_idle = idle_is_free && !(layout_->has_one_slot && open_ && !open_->ended);
  for (auto next = due_.begin(); next != due_.end() && absorbing_ < kMaxPassesInFlight;) {
    if (one_at_a_time() && in_flight_ > 0) return;
    const uint32_t index = *next;
    if (buckets_[index].absorbing || gate_.Holds(index)) {
      ++next;
      continue;
    }
    next = due_.erase(next);
    if (buckets_[index].pending != 0) StartAbsorbing(index, when_idle);
  }
}

// A pass that publishes takes in one gradient at most, chunk by chunk.
bool StepMachine::AbsorbsFirst(uint32_t index) const {
  const Bucket& bucket = buckets_[index];
  if (maintenance_ || bucket.pending == 0 || layout_->buckets[index].log_slots == 0) return false;
  return bucket.phase == Phase::kUpdating || (bucket.phase == Phase::kQueued && Speculates(bucket));
}

PassArguments StepMachine::AbsorbArguments(uint32_t index) {
  const Bucket& bucket = buckets_[index];
  const BucketLayout& layout = layout_->buckets[index];
  const auto nothing = [](uint32_t) { return std::optional<kernels::StepConstants>(); };
  const auto segments = [&](uint64_t t) {
    return MakeSegments(
        *layout_, layout, [&](uint32_t parameter) { return Committed(t, layout.group, parameter); }, nothing);
  };
  PassArguments arguments{.kind = PassKind::kAbsorb};
  if (bucket.pending == 0) return arguments;
  for (uint64_t t = bucket.first_pending; t < bucket.pending; ++t) arguments.earlier.push_back({t, segments(t)});
  arguments.segments = segments(bucket.pending);
  arguments.absorbed_step = bucket.pending;
  return arguments;
}

void StepMachine::StartAbsorbing(uint32_t index, bool when_idle) {
  Bucket& bucket = buckets_[index];
  bucket.absorbing = true;
  ++absorbing_;
  ++in_flight_;
  bucket.pass->Start(platform_, AbsorbArguments(index), when_idle);
}

void StepMachine::HurryAbsorbing() {
  for (uint32_t i = 0, left = absorbing_; left > 0; ++i) {
    if (!buckets_[i].absorbing) continue;
    platform_.pool->Hurry(buckets_[i].pass.get());
    --left;
  }
}

bool StepMachine::Speculates(const Bucket& bucket) const {
  return open_->speculate && !layout_->in_place && bucket.landing == Landing::kSlot && !Hurry() &&
         std::isfinite(bucket.sum_of_squares.value_or(0));
}

// Whether a bucket that has just arrived needs no pass before the verdict.
bool StepMachine::IsNormed(const Bucket& bucket) const {
  return !maintenance_ && bucket.phase == Phase::kQueued && bucket.sum_of_squares && !Speculates(bucket);
}

// Whether the bucket's next pass might write state that a snapshot still has to save.
bool StepMachine::MustKeepState(uint32_t index) const {
  if (!gate_.Holds(index)) return false;
  return maintenance_ ? maintenance_->kind != PassKind::kPublishMasters &&
                            (buckets_[index].pending != 0 || maintenance_->kind == PassKind::kPush)
                      : buckets_[index].phase != Phase::kUndoing && buckets_[index].pending != 0;
}

void StepMachine::StartPass(uint32_t index) {
  Bucket& bucket = buckets_[index];
  if (!maintenance_ && bucket.phase == Phase::kQueued) {
    bucket.phase = Speculates(bucket) ? Phase::kSpeculating : Phase::kNorming;
  }
  ++in_flight_;
  bucket.pass->Start(platform_, ArgumentsOf(index));
}

PassArguments StepMachine::ArgumentsOf(uint32_t index) {
  const Bucket& bucket = buckets_[index];
  const BucketLayout& layout = layout_->buckets[index];
  const uint64_t t = statistics_.committed_steps;
  const auto nothing = [](uint32_t) { return std::optional<kernels::StepConstants>(); };
  const auto pending = [&](uint32_t parameter) {
    return bucket.pending == 0 ? std::nullopt : Committed(bucket.pending, layout.group, parameter);
  };
  const auto committed = [&](uint32_t parameter) { return Committed(t, layout.group, parameter); };
  const auto speculative = [&](uint32_t parameter) { return Speculative(layout.group, parameter); };
  if (maintenance_) {
    return maintenance_->kind == PassKind::kAbsorb ? AbsorbArguments(index) : PassArguments{.kind = maintenance_->kind};
  }
  switch (bucket.phase) {
    case Phase::kUndoing:
      if (IsSkip(open_->verdict->verdict)) return {PassKind::kPublishMasters, {}};
      return {PassKind::kRepublish, MakeSegments(*layout_, layout, nothing, committed), 0, t, /*sum_known=*/true};
    case Phase::kUpdating:
      if (layout_->in_place) {
        PassArguments arguments = AbsorbArguments(index);
        arguments.kind = PassKind::kTakeIn;
        return arguments;
      }
      return {PassKind::kUpdate, MakeSegments(*layout_, layout, pending, committed), bucket.pending, t,
              /*sum_known=*/true};
    case Phase::kSpeculating:
      return {PassKind::kSpeculate, MakeSegments(*layout_, layout, pending, speculative), bucket.pending, t + 1,
              bucket.sum_of_squares.has_value()};
    default:
      SUPEROFFLOAD_CHECK(bucket.phase == Phase::kNorming, "bucket ", index);
      return {PassKind::kNorm, MakeSegments(*layout_, layout, nothing, speculative), 0, t + 1};
  }
}

void StepMachine::PassDone(uint32_t pass) {
  const CheckScope scope(name_, statistics_.step);
  SUPEROFFLOAD_CHECK_LT(0u, in_flight_, "pass ", pass, " has ended that was not started");
  --in_flight_;
  if (pass != kRecoveryPass) {
    Bucket& bucket = buckets_[pass];
    observer_->OnPass(bucket.pass->report());
    if (bucket.absorbing) {
      bucket.absorbing = false;
      --absorbing_;
      Absorbed(pass);
      if (std::erase(held_, pass) > 0) ready_.insert(pass);
    } else if (maintenance_) {
      Absorbed(pass);
    } else {
      FinishPass(pass);
    }
  }
  Proceed();
}

void StepMachine::Proceed() {
  if (open_ && !open_->ended && layout_->has_one_slot) AbsorbDue();
  Advance();
  if (open_) {
    MaybeAnswerNorm();
    MaybePrepare();
    MaybeDecide();
    MaybeClose();
    MaybePark();
  }
  ProceedMaintenance();
  MaybeTakeSnapshot();
  AbsorbDue();
  AbsorbEarly();
}

void StepMachine::FinishPass(uint32_t index) {
  Bucket& bucket = buckets_[index];
  switch (bucket.pass->arguments().kind) {
    case PassKind::kNorm:
      Leave(index, Phase::kNorming);
      SetSum(bucket, bucket.pass->sum_of_squares());
      bucket.phase = Phase::kNormed;
      break;
    case PassKind::kSpeculate:
      Leave(index, Phase::kSpeculating);
      if (!bucket.sum_of_squares) SetSum(bucket, bucket.pass->sum_of_squares());
      Absorbed(index);
      FinishSpeculation(index);
      break;
    case PassKind::kUpdate:
      Leave(index, Phase::kUpdating);
      Absorbed(index);
      Commit(index);
      break;
    case PassKind::kTakeIn:
      Leave(index, Phase::kUpdating);
      Finalize(index);
      Absorbed(index);  // its parameters are told of before the slot: they leave it before the next gradient comes
      break;
    case PassKind::kRepublish:
      Leave(index, Phase::kUndoing);
      Commit(index);
      break;
    case PassKind::kPublishMasters:
      Leave(index, Phase::kUndoing);
      Finalize(index);
      break;
    case PassKind::kAbsorb:
    case PassKind::kPush:
      break;  // maintenance only
  }
}

// Where its sum was known, the verdict may have come before.
void StepMachine::FinishSpeculation(uint32_t index) {
  if (!open_->verdict) {
    buckets_[index].phase = Phase::kSpeculated;
    Publish(index, /*speculative=*/true);
  } else if (open_->verdict->speculation_stands) {
    Commit(index);
  } else {
    buckets_[index].phase = Phase::kUndoing;
    ready_.insert(index);
  }
}

void StepMachine::SetSum(Bucket& bucket, double sum_of_squares) {
  SUPEROFFLOAD_CHECK(!bucket.sum_of_squares, "a second sum of squares");
  bucket.sum_of_squares = sum_of_squares;
  ++open_->measured;
}

void StepMachine::Leave(uint32_t index, Phase phase) const {
  SUPEROFFLOAD_CHECK(open_, "a pass over bucket ", index, " without an open step");
  SUPEROFFLOAD_CHECK_EQ(static_cast<int>(buckets_[index].phase), static_cast<int>(phase), "bucket ", index);
}

// Its gradient is the committed step's, and the state lacks it.
void StepMachine::Commit(uint32_t index) {
  SetPending(index, statistics_.committed_steps);
  Finalize(index);
}

void StepMachine::Finalize(uint32_t index) {
  SUPEROFFLOAD_CHECK_LT(0u, open_->to_finish, "bucket ", index);
  buckets_[index].phase = Phase::kFinal;
  record_.MarkPublished(index);
  --open_->to_finish;
  Publish(index, /*speculative=*/false);
}

void StepMachine::Publish(uint32_t index, bool speculative) {
  const BucketLayout& bucket = layout_->buckets[index];
  open_->published_bytes += bucket.parameters_bytes();
  TellPublished(index, speculative);
}

void StepMachine::TellPublished(uint32_t index, bool speculative) {
  if (sink_ != nullptr) sink_->ParametersReady(statistics_.step, index, speculative);
}

void StepMachine::Absorbed(uint32_t index) {
  Bucket& bucket = buckets_[index];
  const uint64_t last = bucket.pass->arguments().absorbed_step;
  if (bucket.pending == 0 || last == 0) return;
  for (uint64_t t = bucket.first_pending; sink_ != nullptr && t <= last; ++t) {
    sink_->SlotFree(statistics_.step, index, layout_->buckets[index].GradientSlot(t, record_.Logged(t, index)));
  }
  bucket.first_pending = last + 1;
  if (last == bucket.pending) bucket.pending = 0;  // else a step was committed meanwhile
}

}  // namespace superoffload::engine
