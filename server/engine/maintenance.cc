// What a step machine does between steps: recovery, settling, pushing, pulling, snapshots and restoring.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "server/engine/step_machine.h"

namespace superoffload::engine {
namespace {

absl::Status Incomplete(Incompleteness why) {
  if (why == Incompleteness::kNeverFilled) {
    return absl::DataLossError(
        "the optimizer is incomplete: its trainer ended before the first push_params or restore was whole; attach with "
        "push_params (the trainer's parameters win), restore a checkpoint, or delete the optimizer");
  }
  return absl::DataLossError(
      "the optimizer is incomplete: restoring a checkpoint failed or was cut off; restore one, or delete the "
      "optimizer");
}

}  // namespace

void StepMachine::Maintain(std::vector<Stage> stages, std::function<void()> done) {
  SUPEROFFLOAD_CHECK(!open_ && !maintenance_, "maintenance inside a step");
  maintenance_.emplace();
  maintenance_->stages.assign(std::make_move_iterator(stages.begin()), std::make_move_iterator(stages.end()));
  maintenance_->done = std::move(done);
  Proceed();
}

void StepMachine::ProceedMaintenance() {
  while (maintenance_ && !maintenance_->loading && Idle()) {
    if (maintenance_->stages.empty()) {
      const std::function<void()> done = std::move(maintenance_->done);
      maintenance_.reset();
      done();
      return;
    }
    const Stage stage = std::move(maintenance_->stages.front());
    maintenance_->stages.pop_front();
    stage();
  }
}

StepMachine::Stage StepMachine::Passes(PassKind kind, uint32_t first_bucket) {
  return [this, kind, first_bucket] {
    maintenance_->kind = kind;
    for (uint32_t i = first_bucket; i < buckets_.size(); ++i) {
      if (kind != PassKind::kAbsorb || buckets_[i].pending != 0) ready_.insert(i);
    }
    Advance();
  };
}

StepMachine::Stage StepMachine::MarkPublishedStage(uint32_t first_bucket) {
  return [this, first_bucket] {
    for (uint32_t i = first_bucket; i < buckets_.size(); ++i) record_.MarkPublished(i);
  };
}

StepMachine::Stage StepMachine::PublishLoggedStage(uint32_t first_bucket) {
  return [this, first_bucket] {
    maintenance_->kind = PassKind::kPublishMasters;
    for (uint32_t i = first_bucket; i < buckets_.size(); ++i) {
      if (record_.unpublished(i)) ready_.insert(i);
    }
    Advance();
  };
}

// What was settled has nothing left to absorb, so that only the push itself is to be finished after a death.
std::vector<StepMachine::Stage> StepMachine::PushStages() {
  return {[this] { record_.BeginPush(); }, Passes(PassKind::kPush), MarkPublishedStage(),
          [this] { record_.EndPush(); }};
}

absl::Status StepMachine::Settle(uint32_t first_bucket, std::function<void()> done) {
  if (absl::Status status = CheckNoStepOpen("settling"); !status.ok()) return status;
  std::vector<Stage> stages = {Passes(PassKind::kAbsorb, first_bucket)};
  if (layout_->has_logs) {
    stages.push_back(PublishLoggedStage(first_bucket));
    stages.push_back(MarkPublishedStage(first_bucket));
  }
  Maintain(std::move(stages), std::move(done));
  return absl::OkStatus();
}

absl::Status StepMachine::Push(std::function<void()> done) {
  if (absl::Status status = CheckNoStepOpen("pushing parameters"); !status.ok()) return status;
  if (absl::Status status = CheckNotPrepared("pushing parameters"); !status.ok()) return status;
  if (absl::Status status = CheckComplete(/*before_push=*/true); !status.ok()) return status;
  std::vector<Stage> stages = PushStages();
  stages.insert(stages.begin(), Passes(PassKind::kAbsorb));
  Maintain(std::move(stages), std::move(done));
  return absl::OkStatus();
}

absl::Status StepMachine::Pull(std::function<void()> done) {
  if (absl::Status status = CheckNoStepOpen("pulling parameters"); !status.ok()) return status;
  if (layout_->in_place) {  // the prepared step's gradients are there
    if (absl::Status status = CheckNotPrepared("pulling parameters"); !status.ok()) return status;
  }
  if (absl::Status status = CheckComplete(/*before_push=*/false); !status.ok()) return status;
  Maintain({Passes(PassKind::kAbsorb), Passes(PassKind::kPublishMasters), MarkPublishedStage()}, std::move(done));
  return absl::OkStatus();
}

void StepMachine::Recover(std::function<void()> done) {
  std::vector<Stage> stages;
  if (record_.complete() && record_.committed() > 0) {
    stages.push_back([this] {
      recovery_ = std::make_unique<RecoveryPass>(*layout_, memory_, &record_, [this] { pass_done_(kRecoveryPass); });
      ++in_flight_;
      recovery_->Start(platform_);
    });
  }
  if (record_.incompleteness() == Incompleteness::kPushing) {
    for (Stage& stage : PushStages()) stages.push_back(std::move(stage));
  }
  Maintain(std::move(stages), std::move(done));
}

bool StepMachine::SnapshotDue() const {
  if (gate_.closed() || !record_.complete() || (!open_ && record_.prepared())) return false;
  for (const auto& [number, request] : snapshots_) {
    if (statistics_.committed_steps >= request.time.committed_steps) return true;
  }
  return false;
}

bool StepMachine::HeldForSnapshot() const {
  const uint64_t now = statistics_.committed_steps;
  if (next_snapshot_ != 0 && next_snapshot_ == now) return true;
  for (const auto& [number, request] : snapshots_) {
    if (request.time.exact && request.time.committed_steps == now) return true;
  }
  return false;
}

void StepMachine::ForgetNextSnapshot() {
  next_snapshot_ = 0;
  Proceed();
}

uint64_t StepMachine::RequestSnapshot(const SnapshotTime& time, SnapshotDone done) {
  const uint64_t number = ++last_snapshot_;
  if (time.next != 0) next_snapshot_ = 0;  // the request itself holds steps from here on
  if (statistics_.committed_steps >= time.committed_steps) {
    absl::Status status = CheckComplete(/*before_push=*/false);
    const bool in_next = open_ && !open_->verdict;  // else the open step is over in all but its last passes
    if (status.ok() && time.exact && (in_next || statistics_.committed_steps > time.committed_steps)) {
      status = absl::OutOfRangeError(absl::StrCat(
          "a checkpoint of step ", time.committed_steps, " is not possible after ", statistics_.committed_steps,
          " committed steps", in_next ? " and within the next" : "", "; name a later step, the same on all ranks"));
    }
    if (status.ok() && !open_) status = CheckNotPrepared("a checkpoint");
    if (!status.ok()) {
      done(status);
      return number;
    }
  }
  snapshots_[number] = {time, std::move(done)};
  Proceed();
  return number;
}

bool StepMachine::CancelSnapshot(uint64_t request) { return snapshots_.erase(request) > 0; }

void StepMachine::MaybeTakeSnapshot() {
  if (!BetweenSteps() || !SnapshotDue()) return;
  auto due = snapshots_.begin();
  while (statistics_.committed_steps < due->second.time.committed_steps) ++due;
  SnapshotDone done = std::move(due->second.done);
  if (due->second.time.next != 0) next_snapshot_ = due->second.time.next;
  snapshots_.erase(due);
  Maintain({Passes(PassKind::kAbsorb)}, [this, done = std::move(done)] {
    gate_.Close(static_cast<uint32_t>(buckets_.size()));
    done(Moment{statistics_, groups_, parameter_steps()});
  });
}

void StepMachine::BucketSaved(uint32_t bucket) {
  if (gate_.Saved(bucket)) ready_.insert(bucket);
  Proceed();
}

void StepMachine::EndSnapshot() {
  for (const uint32_t bucket : gate_.Open()) ready_.insert(bucket);
  Proceed();
}

absl::Status StepMachine::BeginRestore() {
  SUPEROFFLOAD_CHECK(BetweenSteps(), "restoring inside a step");
  if (absl::Status status = CheckNotPrepared("restoring"); !status.ok()) return status;
  if (gate_.closed()) {
    return absl::FailedPreconditionError("a checkpoint of the optimizer is being taken; wait for its end");
  }
  maintenance_.emplace();
  maintenance_->loading = true;
  for (Bucket& bucket : buckets_) bucket.pending = 0;
  due_.clear();
  record_.BeginRestore();
  return absl::OkStatus();
}

void StepMachine::EndRestore(const Moment* restored, std::function<void()> done) {
  SUPEROFFLOAD_CHECK(maintenance_ && maintenance_->loading, "a restore ends that did not begin");
  maintenance_->loading = false;
  maintenance_->done = std::move(done);
  if (restored != nullptr) {
    record_.EndRestore(restored->statistics.committed_steps, restored->parameter_steps);
    groups_ = restored->groups;
    const uint64_t steps = restored->statistics.committed_steps;
    statistics_ = {
        .step = steps, .committed_steps = steps, .restores = statistics_.restores + 1, .restored_steps = steps};
    next_snapshot_ = 0;
    for (auto& [number, request] : std::exchange(snapshots_, {})) {
      request.done(absl::AbortedError("the optimizer was restored; take the checkpoint again"));
    }
    maintenance_->stages.push_back(Passes(PassKind::kPublishMasters));
    maintenance_->stages.push_back(MarkPublishedStage());
  }
  Proceed();
}

absl::Status StepMachine::CheckComplete(bool before_push) const {
  const Incompleteness why = record_.incompleteness();
  const bool pushable = why == Incompleteness::kNeverFilled || why == Incompleteness::kPushing;
  return record_.complete() || (before_push && pushable) ? absl::OkStatus() : Incomplete(why);
}

std::vector<uint64_t> StepMachine::parameter_steps() const {
  std::vector<uint64_t> steps(layout_->placements.size());
  for (uint32_t i = 0; i < steps.size(); ++i) steps[i] = record_.ParameterSteps(statistics_.committed_steps, i);
  return steps;
}

}  // namespace superoffload::engine
