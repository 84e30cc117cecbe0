#include "tests/fault/simulated/simulated_daemon.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::faults {

SimulatedDaemon::SimulatedDaemon(Ground* ground, std::function<void()> on_death)
    : ground_(*ground),
      on_death_(std::move(on_death)),
      memory_(ground->memory.view(ground->layout)),
      checkpoints_(ground, this) {}

SimulatedDaemon::~SimulatedDaemon() = default;

void SimulatedDaemon::After(std::function<void()> event) {
  ground_.time.After(ground_.random.Delay(), [this, life = life_, event = std::move(event)] {
    if (life != life_) return;
    try {
      if (ground_.deaths.DaemonDies()) throw ProcessDied();
      event();
    } catch (const ProcessDied&) {
      Die();
    }
  });
}

void SimulatedDaemon::Start() {
  ++life_;
  ++lives_;
  recovered_ = false;
  ground_.kernel_deaths.ChooseInstructionSet();
  ground_.deaths.set_hard_times(true);
  After([this] { Create(); });
}

void SimulatedDaemon::Create() {
  ground_.log.Add("daemon", "starts", lives_);
  workers_ = std::make_unique<SimulatedWorkers>(&ground_, ground_.scenario.workers,
                                                [this](std::function<void()> event) { After(std::move(event)); });
  machine_ = std::make_unique<engine::StepMachine>(
      &ground_.layout, ground_.scenario.spec.groups, memory_, ground_.scenario.policy,
      engine::Platform(workers_.get(), &ground_.clock, &ground_.deaths), this,
      [this](uint32_t pass) { After([this, pass] { machine_->PassDone(pass); }); });
  machine_->Recover([this] {
    ground_.log.Add("daemon", "has recovered", machine_->statistics().committed_steps);
    recovered_ = true;
    ground_.deaths.set_hard_times(false);
  });
  if (ground_.scenario.run) machine_->RequireTotals();
  if (!created_) machine_->AwaitFirstFill();
  created_ = true;
  if (ground_.scenario.snapshots) checkpoints_.Start();
}

void SimulatedDaemon::Die() {
  ground_.log.Add("daemon", "is dead", lives_);
  ++life_;  // no event of it happens any more
  if (workers_ != nullptr) workers_->Die();
  RetireDevice();
  checkpoints_.Die();
  machine_.reset();
  workers_.reset();
  wanted_.reset();
  attached_.reset();
  on_death_();
  ground_.time.After(ground_.random.Delay(), [this] { Start(); });
}

void SimulatedDaemon::RetireDevice() {
  if (device_ == nullptr) return;
  device_->Kill();
  retired_devices_.push_back(std::move(device_));
}

void SimulatedDaemon::Attach(const Wish& wish) {
  wanted_ = wish.rings;
  After([this, wish] { TryAttach(wish); });
}

void SimulatedDaemon::TryAttach(const Wish& wish) {
  if (wanted_ != wish.rings) return;
  if (!recovered_ || attached_ != nullptr || !machine_->BetweenSteps() || (wish.restore && checkpoints_.busy())) {
    return After([this, wish] { TryAttach(wish); });
  }
  ground_.deaths.set_hard_times(true);
  if (machine_->prepared()) return Agree(wish);
  if (wish.restore && (wish.restore_anyway || !machine_->CheckComplete(/*before_push=*/false).ok())) {
    ground_.log.Add("daemon", "restores", wish.restore->moment.statistics.committed_steps);
    if (absl::Status status = machine_->BeginRestore(); !status.ok()) Fail("restoring: ", status.message());
    return After([this, wish] { Load(wish, 0); });
  }
  ground_.log.Add("daemon", wish.push ? "pushes" : "pulls", wish.rings->epoch());
  const auto filled = [this, wish] { After([this, wish] { Admit(wish); }); };
  if (wish.push) return Push(wish, filled);
  if (absl::Status status = machine_->Pull(filled); !status.ok()) Fail("pulling: ", status.message());
}

// A trainer fills the memory once it is attached, which settles; unless it has died before.
void SimulatedDaemon::Push(const Wish& wish, std::function<void()> done) {
  const auto fill = [this, wish, done = std::move(done)] {
    After([this, wish, done] {
      if (wanted_ != wish.rings) return;
      ground_.published() = *wish.push;
      if (absl::Status status = machine_->Push(done); !status.ok()) Fail("pushing: ", status.message());
    });
  };
  if (absl::Status status = machine_->Settle(0, fill); !status.ok()) Fail("settling: ", status.message());
}

// The ranks of a run come together anew: who is behind follows, and what nobody has committed is abandoned.
void SimulatedDaemon::Agree(const Wish& wish) {
  const absl::StatusOr<engine::RunReport> report = machine_->Report();
  if (!report.ok()) Fail("reporting: ", report.status().message());
  const engine::Record::Prepared prepared = *report->prepared;
  const std::optional<double> total = wish.committed_elsewhere(prepared.attempt);
  ground_.log.Add("daemon", total ? "follows" : "abandons", prepared.step, prepared.attempt);
  const auto agreed = [this, wish] { After([this, wish] { TryAttach(wish); }); };
  absl::Status status;
  if (total) {
    engine::Record::RunTerms terms = prepared.terms;
    terms.sum_of_squares = *total;
    status = machine_->CommitPrepared(prepared.attempt, terms, agreed);
  } else {
    status = machine_->AbandonPrepared(prepared.attempt);
    agreed();
  }
  if (!status.ok()) Fail("agreeing: ", status.message());
}

void SimulatedDaemon::Load(const Wish& wish, uint32_t bucket) {
  if (bucket < ground_.buckets() && !ground_.random.Chance(0.02)) {
    const engine::BucketLayout& place = ground_.layout.buckets[bucket];
    const engine::StateFormat& format = ground_.layout.FormatOf(place);
    for (size_t array = 0; array < format.arrays.size(); ++array) {
      const uint64_t at = format.Byte(array, place.state_offset);
      std::memcpy(ground_.memory.state.data() + at, wish.restore->state.data() + at,
                  format.arrays[array].array.Bytes(place.elements));
    }
    return After([this, wish, bucket] { Load(wish, bucket + 1); });
  }
  const bool whole = bucket == ground_.buckets();
  ground_.log.Add("daemon", whole ? "has restored" : "fails to restore", bucket);
  machine_->EndRestore(whole ? &wish.restore->moment : nullptr, [this, wish, whole] {
    Wish next = wish;
    next.restore_anyway = !whole;
    After([this, next] { TryAttach(next); });
  });
}

void SimulatedDaemon::Admit(const Wish& wish) {
  if (wanted_ != wish.rings) return;
  ground_.deaths.set_hard_times(false);
  wanted_.reset();
  attached_ = wish.rings;
  if (wish.gpu != nullptr) {
    device_ = std::make_unique<SimulatedDevice>(&ground_, wish.gpu, wish.rings, machine_.get(),
                                                [this](std::function<void()> event) { After(std::move(event)); });
    machine_->Attach(device_.get());
  } else {
    machine_->Attach(wish.rings.get());
  }
  const engine::StepStatistics& now = machine_->statistics();
  ground_.log.Add("daemon", "attaches", now.step, now.committed_steps);
  wish.attached({now.step, now.committed_steps, now.next_slot(), machine_->parameter_steps(), machine_->groups()});
}

void SimulatedDaemon::Detach(const std::shared_ptr<SimulatedRings>& rings) {
  After([this, rings] {
    if (wanted_ == rings) wanted_.reset();
    if (attached_ != rings) return;
    if (device_ != nullptr && !device_->idle()) return Detach(rings);  // what it has issued is done before
    ground_.log.Add("daemon", "detaches", rings->epoch());
    machine_->Detach();
    RetireDevice();
    attached_.reset();
  });
}

void SimulatedDaemon::Submitted(const std::shared_ptr<SimulatedRings>& rings) {
  if (alive()) After([this, rings] { TakeSubmission(rings); });
}

void SimulatedDaemon::TakeSubmission(const std::shared_ptr<SimulatedRings>& rings) {
  if (attached_ != rings) return;
  const superoffload_ring_entry entry = rings->submissions.front();
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_BEGIN_STEP &&
      (!machine_->MayBegin() || (device_ != nullptr && !device_->idle()))) {
    return After([this, rings] { TakeSubmission(rings); });
  }
  rings->submissions.pop_front();
  ground_.log.Add("daemon", "takes submission", entry.opcode, entry.index);
  if (device_ != nullptr) return device_->Submit(entry);
  const absl::Status status = transport::DeliverEntry(entry, rings->epoch(), std::nullopt, *machine_);
  if (!status.ok()) Fail("submission ", entry.opcode, " is rejected: ", status.message());
}

void SimulatedDaemon::Settle(const std::shared_ptr<SimulatedRings>& rings, uint32_t first_bucket,
                             std::function<void()> settled) {
  if (!alive()) return;
  After([this, rings, first_bucket, settled] {
    if (attached_ != rings) return;
    if (!machine_->BetweenSteps()) return Settle(rings, first_bucket, settled);
    ground_.log.Add("daemon", "settles", first_bucket);
    if (absl::Status status = machine_->Settle(first_bucket, settled); !status.ok()) Fail(status.message());
  });
}

void SimulatedDaemon::Settle(std::function<void()> settled) {
  checkpoints_.Stop();
  if (alive()) After([this, settled] { TrySettle(settled); });
}

void SimulatedDaemon::TrySettle(std::function<void()> settled) {
  if (!recovered_ || attached_ != nullptr || !machine_->BetweenSteps() || checkpoints_.busy()) {
    return After([this, settled] { TrySettle(settled); });
  }
  const absl::Status status = machine_->Settle(0, [this, settled] { After(settled); });
  if (!status.ok()) Fail("settling: ", status.message());
}

std::string SimulatedDaemon::Describe() const {
  if (!alive()) return "there is no daemon";
  return absl::StrCat("the daemon is in step ", machine_->statistics().step, " with ",
                      machine_->statistics().committed_steps, " committed", recovered_ ? "" : ", recovers",
                      machine_->maintaining() ? ", in maintenance" : "", machine_->BetweenSteps() ? ", at rest" : "",
                      attached_ ? ", attached" : "", wanted_ ? ", a trainer waits to attach" : "",
                      workers_->idle() ? "" : ", workers run", checkpoints_.busy() ? ", a checkpoint is written" : "");
}

}  // namespace superoffload::faults
