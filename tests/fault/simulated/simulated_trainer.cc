#include "tests/fault/simulated/simulated_trainer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::faults {
namespace {

std::vector<std::byte> InitialParameters(Ground& ground) {
  std::vector<std::byte> parameters(ground.layout.parameters_bytes);
  for (size_t p = 0; p < ground.layout.placements.size(); ++p) {
    const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
    for (uint64_t i = 0; i < ElementCount(parameter); ++i) {
      test::StoreElement(parameters.data() + ground.layout.placements[p].parameters_offset, i, parameter.dtype,
                         static_cast<float>(2 * ground.random.Unit() - 1));
    }
  }
  return parameters;
}

// A user changes some weights between steps.
void Edit(Ground& ground, std::vector<std::byte>* parameters) {
  for (size_t p = 0; p < ground.layout.placements.size(); ++p) {
    const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
    const uint64_t elements = ElementCount(parameter);
    for (uint64_t i = ground.random.Below(3); i < elements; i += ground.random.Between(1, 40)) {
      test::StoreElement(parameters->data() + ground.layout.placements[p].parameters_offset, i, parameter.dtype,
                         static_cast<float>(2 * ground.random.Unit() - 1));
    }
  }
}

}  // namespace

SimulatedTrainer::SimulatedTrainer(Ground* ground, SimulatedDaemon* daemon, std::function<void()> on_finished)
    : ground_(*ground),
      daemon_(*daemon),
      on_finished_(std::move(on_finished)),
      oracle_(ground, InitialParameters(*ground)),
      attempt_(MakeAttempt(*ground, oracle_.groups())),
      restores_left_(ground->scenario.restores),
      model_(oracle_.parameters()),
      has_model_(true) {}

void SimulatedTrainer::After(std::function<void()> event) {
  ground_.time.After(ground_.random.Delay(), [this, life = life_, event = std::move(event)] {
    if (life != life_) return;
    if (!finished_ && ground_.deaths.TrainerDies()) return Die();
    event();
  });
}

void SimulatedTrainer::Start() {
  After([this] { Connect(); });
}

void SimulatedTrainer::Die() {
  ++life_;
  if (rings_ != nullptr && daemon_.alive()) daemon_.Detach(rings_);
  if (gpu_ != nullptr) {
    gpu_->Kill();
    retired_gpus_.push_back(std::move(gpu_));
  }
  left_.reset();
  Disconnect();
  has_model_ = !filled_;  // who starts the run anew starts from the same parameters
  Start();
}

void SimulatedTrainer::DaemonDied() {
  After([this, rings = rings_] {
    if (rings == nullptr || rings != rings_ || finished_) return;
    ground_.log.Add("trainer", "loses the daemon", rings->epoch());
    Disconnect();
    Connect();
  });
}

void SimulatedTrainer::Disconnect() {
  rings_.reset();
  attached_ = false;
  if (gpu_ != nullptr) gpu_->End();
}

void SimulatedTrainer::Connect() {
  if (!GpuHasEnded() || !daemon_.serving()) return Start();
  ++epoch_;
  rings_ = std::make_shared<SimulatedRings>(epoch_, [this, epoch = epoch_] {
    After([this, epoch] {
      if (attached_ && rings_->epoch() == epoch) TakeCompletion();
    });
  });
  gpu_memory_ = ground_.scenario.gpu() ? std::make_shared<SimulatedGpuMemory>(&ground_) : nullptr;
  const bool restores_again = ChooseRestore();
  // Whoever knows what the parameters are may push them.
  const bool push = !filled_ || (has_model_ && !in_question_ && !restoring_ && ground_.random.Chance(0.4));
  if (push && filled_ && !edited_ && ground_.random.Chance(ground_.scenario.edit)) {
    Edit(ground_, &model_);
    edited_ = model_;
  }
  // The model's parameters lie there, unless gradients may, too.
  if (push && !ground_.layout.in_place) ground_.published() = model_;
  ground_.log.Add("trainer", push ? "connects to push" : "connects to pull", epoch_);
  daemon_.Attach({.push = push ? std::optional(model_) : std::nullopt,
                  .restore = restoring_,
                  .restore_anyway = !restores_again || ground_.random.Chance(0.5),
                  .rings = rings_,
                  .gpu = ground_.scenario.daemon_copies() ? gpu_memory_ : nullptr,
                  .committed_elsewhere = [this](uint64_t attempt) { return CommittedElsewhere(attempt); },
                  .attached =
                      [this, rings = rings_](const Welcome& welcome) {
                        After([this, rings, welcome] {
                          if (rings == rings_) Attached(welcome);
                        });
                      }});
}

bool SimulatedTrainer::ChooseRestore() {
  if (restoring_) return true;
  const std::vector<Checkpoint>& checkpoints = daemon_.checkpoints().whole();
  if (in_question_ || edited_ || restores_left_ == 0 || checkpoints.empty() || ground_.random.Chance(0.2)) return false;
  --restores_left_;
  restoring_ = std::make_shared<Checkpoint>(checkpoints[ground_.random.Below(checkpoints.size())]);
  return false;
}

void SimulatedTrainer::Attached(const Welcome& welcome) {
  ground_.log.Add("trainer", "is attached", welcome.step, welcome.committed_steps);
  filled_ = attached_ = true;
  if (in_question_ && welcome.committed_steps == oracle_.committed_steps() + 1) {
    if (IsSkip(oracle_.Resolve(attempt_))) Fail("a step was committed that was to be skipped");
    attempt_ = MakeAttempt(ground_, oracle_.groups());
  } else {
    CheckNothingIsLost();
  }
  ForgetContribution();
  in_question_ = false;
  LearnRestore(welcome);
  if (welcome.committed_steps != oracle_.committed_steps()) {
    Fail(welcome.committed_steps, " steps are committed, but must be ", oracle_.committed_steps());
  }
  if (welcome.next_slot != welcome.committed_steps % 2) Fail("the next slot is ", welcome.next_slot);
  model_ = ground_.published();
  has_model_ = true;
  // A push that was cut off is whole, or it never was.
  if (edited_ && !oracle_.HasParameters(model_)) oracle_.Push(*edited_);
  edited_.reset();
  oracle_.CheckParameters(model_, "after attaching");
  progress_.emplace(welcome.step, ground_.buckets());
  step_ = welcome.step;
  over_ = true;
  slot_ = welcome.next_slot;
  // Pushing and pulling settle.
  free_.assign(ground_.layout.kept_steps, std::vector<bool>(ground_.buckets(), true));
  sent_groups_.assign(oracle_.groups().size(), {});
  waking_ = 0;
  changing_residents_ = false;
  if (ground_.scenario.gpu()) OpenGpu(welcome);
  NextAttempt();
}

// One that was asked for again may not have begun, and not be needed.
void SimulatedTrainer::LearnRestore(const Welcome& welcome) {
  const std::shared_ptr<const Checkpoint> asked = std::exchange(restoring_, nullptr);
  if (!asked || welcome.committed_steps != asked->moment.statistics.committed_steps) return;
  if (welcome.committed_steps == oracle_.committed_steps() && oracle_.HasParameters(ground_.published())) return;
  for (const Checkpoint& checkpoint : daemon_.checkpoints().whole()) oracle_.CheckCheckpoint(checkpoint);
  daemon_.checkpoints().Forget();
  oracle_.Restore(*asked);
}

void SimulatedTrainer::NextAttempt() {
  stage_ = Stage::kEarlyGroups;
  absent_done_ = 0;
  measure_asked_ = false;
  may_change_what_stays_ = true;
  host_slots_.assign(ground_.buckets(), slot_);
  written_.assign(ground_.buckets(), false);
  submitted_.assign(ground_.buckets(), false);
  passes_.assign(ground_.buckets(), 0);
  if (oracle_.committed_steps() < ground_.scenario.steps || !over_ || !has_model_) return Wake();
  ground_.log.Add("trainer", "has finished");
  finished_ = true;
  daemon_.Detach(rings_);
  on_finished_();
}

void SimulatedTrainer::TakeCompletion() {
  const superoffload_ring_entry entry = rings_->completions.front();
  rings_->completions.pop_front();
  ground_.log.Add("trainer", "takes completion", entry.opcode, entry.index);
  if (entry.attachment_epoch != rings_->epoch()) Fail("a completion of attachment ", entry.attachment_epoch);
  const bool any_time = entry.opcode == SUPEROFFLOAD_COMPLETE_SLOT_FREE;
  if (any_time ? entry.step > step_ : entry.step != step_ || over_) {
    Fail("a completion of step ", entry.step, " in step ", step_);
  }
  const bool decided = progress_->step() == step_ && progress_->verdict().has_value();
  if (gpu_ != nullptr) gpu_->OnCompletion(entry);
  if (progress_->Take(entry) && gpu_ != nullptr) gpu_->ExpectLandings(&*progress_);
  switch (entry.opcode) {
    case SUPEROFFLOAD_COMPLETE_SLOT_FREE:
      free_[entry.payload.gradient.slot][entry.index] = true;
      break;
    case SUPEROFFLOAD_COMPLETE_PARAMETERS_READY:
      TakeParameters(entry.index, (entry.flags & SUPEROFFLOAD_FLAG_SPECULATIVE) != 0);
      break;
    case SUPEROFFLOAD_COMPLETE_VERDICT:
      if (decided) Fail("a second verdict on step ", step_);
      TakeVerdict();
      break;
    case SUPEROFFLOAD_COMPLETE_PREPARED:
      if (stage_ != Stage::kPrepare) Fail("a step is prepared that nobody has asked for");
      Contribute();
      break;
    case SUPEROFFLOAD_COMPLETE_GRADIENT_NORM:
      if (stage_ != Stage::kMeasure) Fail("a norm that nobody has asked for");
      break;
    case SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN:
    case SUPEROFFLOAD_COMPLETE_LANDED:
      if (!ground_.scenario.daemon_copies()) Fail("completion ", entry.opcode);
      break;
    default:
      Fail("completion ", entry.opcode);
  }
  if (progress_->step() == step_ && !over_) {  // else it is of the step before
    CopyFinalParameters();
    if (progress_->IsOver()) FinishStep();
  }
  Wake();
}

void SimulatedTrainer::TakeParameters(uint32_t bucket, bool speculative) {
  const bool decided = progress_->verdict().has_value();
  if (speculative == decided) {
    Fail(speculative ? "speculative" : "final", " parameters of bucket ", bucket, decided ? " after" : " before",
         " the verdict");
  }
  std::vector<bool>& told = speculative ? speculative_ : final_;
  if (told[bucket]) Fail("parameters of bucket ", bucket, " are published twice");
  told[bucket] = true;
}

void SimulatedTrainer::TakeVerdict() {
  const superoffload_verdict& verdict = *progress_->verdict();
  if (stage_ != Stage::kEnded) Fail("a verdict on step ", step_, " before its end");
  in_question_ = false;
  ForgetContribution();
  const engine::Verdict expected = oracle_.Resolve(attempt_);
  ground_.log.Add("trainer", "learns verdict", verdict.kind, verdict.committed_steps);
  if (verdict.kind != static_cast<uint32_t>(expected)) {
    Fail("the verdict is ", verdict.kind, " but must be ", static_cast<uint32_t>(expected));
  }
  if (verdict.committed_steps != oracle_.committed_steps()) {
    Fail("the verdict says ", verdict.committed_steps, " steps, but ", oracle_.committed_steps(), " are committed");
  }
  if (verdict.next_slot != oracle_.committed_steps() % 2) Fail("the next slot is ", verdict.next_slot);
  if (verdict.speculated_buckets != std::count(speculative_.begin(), speculative_.end(), true)) {
    Fail(verdict.speculated_buckets, " buckets speculated, it is said");
  }
  if (!IsSkip(expected)) {
    if (verdict.global_norm != oracle_.norm()) Fail("the norm is ", verdict.global_norm, ", not ", oracle_.norm());
    if (measure_asked_ && progress_->norm()->norm != oracle_.norm()) {
      Fail("the norm was measured as ", progress_->norm()->norm);
    }
    for (uint32_t b = 0; b < ground_.buckets(); ++b) free_[host_slots_[b]][b] = false;
  }
  slot_ = verdict.next_slot;
  has_model_ = false;
  copied_.assign(ground_.buckets(), false);
  asked_.assign(ground_.buckets(), false);
  read_.assign(ground_.buckets(), false);
  may_read_all_ = false;
  ++reading_;
  over_ = false;
  attempt_ = MakeAttempt(ground_, oracle_.groups());
  NextAttempt();
}

void SimulatedTrainer::CopyFinalParameters() {
  if (!progress_->verdict() || gpu_ != nullptr) return;
  for (uint32_t b = 0; b < ground_.buckets(); ++b) {
    if (copied_[b] || !progress_->IsFinal(b)) continue;
    const engine::BucketLayout& bucket = ground_.layout.buckets[b];
    std::memcpy(model_.data() + bucket.parameters_offset, ground_.published().data() + bucket.parameters_offset,
                bucket.parameters_bytes());
    copied_[b] = true;
  }
}

void SimulatedTrainer::FinishStep() {
  ground_.log.Add("trainer", "has finished step", step_);
  over_ = may_read_all_ = true;
  if (gpu_ == nullptr) {
    has_model_ = true;
    oracle_.CheckParameters(model_, "after a step");
  }
  if (!ground_.layout.in_place || !IsSkip(static_cast<engine::Verdict>(progress_->verdict()->kind))) {
    oracle_.CheckParameters(ground_.published(), "in memory after a step",
                            [this](uint32_t b) { return gpu_ == nullptr || !gpu_->logs(b); });
  }
  if (oracle_.committed_steps() >= ground_.scenario.steps) return NextAttempt();
  if (!ground_.random.Chance(ground_.scenario.leave)) return;
  ground_.log.Add("trainer", "leaves");
  if (daemon_.alive()) {
    daemon_.Detach(rings_);
    left_ = daemon_.lives();
  }
  Disconnect();
  Start();
}

std::string SimulatedTrainer::Describe() const {
  if (finished_) return "the trainer has finished";
  const auto count = [](const std::vector<bool>& of) { return std::count(of.begin(), of.end(), true); };
  return absl::StrCat("the trainer is ",
                      attached_ ? "attached"
                      : rings_  ? "about to attach"
                                : "gone",
                      ", in step ", step_, over_ ? " (over)" : "", ", stage ", static_cast<int>(stage_), ", ",
                      count(written_), " of ", ground_.buckets(), " gradients written and ", count(submitted_),
                      " submitted, ", count(free_[slot_]), " buckets of its slot free");
}

}  // namespace superoffload::faults
