#include "server/engine/step_engine.h"

#include <utility>

namespace superoffload::engine {

StepEngine::StepEngine(const Layout* layout, std::vector<Scalars> groups, const OptimizerMemory& memory,
                       SpeculationPolicy policy, Platform platform, StepObserver* observer)
    : machine_(layout, std::move(groups), memory, policy, platform, observer,
               [this](uint32_t pass) { Locked(&StepMachine::PassDone, pass); }) {
  absl::MutexLock lock(&mu_);
  bool recovered = false;
  machine_.Recover([&recovered] { recovered = true; });
  mu_.Await(absl::Condition(&recovered));
}

StepEngine::~StepEngine() { Detach(); }

void StepEngine::Detach() {
  absl::MutexLock lock(&mu_);
  machine_.Detach();
  mu_.Await(absl::Condition(&machine_, &StepMachine::BetweenSteps));
}

absl::Status StepEngine::SetScalars(uint32_t group, uint32_t first, std::span<const double> values) {
  absl::MutexLock lock(&mu_);
  return machine_.SetScalars(group, first, values);
}

absl::Status StepEngine::BeginStep(uint64_t step, double gradient_scale) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&machine_, &StepMachine::MayBegin));
  return machine_.BeginStep(step, gradient_scale);
}

absl::Status StepEngine::ParametersAbsent(uint64_t step, uint32_t first, uint32_t count) {
  absl::MutexLock lock(&mu_);
  return machine_.ParametersAbsent(step, first, count);
}

absl::Status StepEngine::GradientReady(uint64_t step, uint32_t bucket, std::optional<double> sum_of_squares,
                                       Landing landing) {
  absl::MutexLock lock(&mu_);
  return machine_.GradientReady(step, bucket, sum_of_squares, landing);
}

absl::Status StepEngine::EndStep(uint64_t step, double gradient_scale, double max_grad_norm, uint64_t streamed_bytes) {
  absl::MutexLock lock(&mu_);
  return machine_.EndStep(step, gradient_scale, max_grad_norm, streamed_bytes);
}

absl::Status StepEngine::PrepareStep(uint64_t step, double gradient_scale, double max_grad_norm) {
  absl::MutexLock lock(&mu_);
  return machine_.PrepareStep(step, gradient_scale, max_grad_norm);
}

absl::Status StepEngine::EndPreparedStep(uint64_t step, double gradient_scale, double max_grad_norm,
                                         const RunTotal& total) {
  absl::MutexLock lock(&mu_);
  return machine_.EndPreparedStep(step, gradient_scale, max_grad_norm, total);
}

absl::Status StepEngine::AbandonStep(uint64_t step) {
  absl::MutexLock lock(&mu_);
  return machine_.AbandonStep(step);
}

absl::Status StepEngine::MeasureNorm(uint64_t step, double gradient_scale) {
  absl::MutexLock lock(&mu_);
  return machine_.MeasureNorm(step, gradient_scale);
}

absl::Status StepEngine::WaitMaintained(const Maintenance& maintain) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&machine_, &StepMachine::MayMaintain));
  bool done = false;
  if (absl::Status status = maintain(machine_, [&done] { done = true; }); !status.ok()) return status;
  mu_.Await(absl::Condition(&done));
  return absl::OkStatus();
}

absl::StatusOr<RunReport> StepEngine::WaitReported() {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&machine_, &StepMachine::MayMaintain));
  return machine_.Report();
}

absl::Status StepEngine::WaitPreparedAbandoned(uint64_t attempt) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&machine_, &StepMachine::MayMaintain));
  return machine_.AbandonPrepared(attempt);
}

absl::StatusOr<StepEngine::Moment> StepEngine::WaitSnapshot(const StepMachine::SnapshotTime& time,
                                                            const std::atomic<bool>& cancelled) {
  absl::MutexLock lock(&mu_);
  std::optional<absl::StatusOr<Moment>> taken;
  const uint64_t request =
      machine_.RequestSnapshot(time, [&taken](absl::StatusOr<Moment> moment) { taken.emplace(std::move(moment)); });
  const auto over = [&taken, &cancelled] { return taken.has_value() || cancelled; };
  mu_.Await(absl::Condition(&over));
  if (!taken && machine_.CancelSnapshot(request)) return absl::CancelledError("the checkpoint was cancelled");
  const auto is_taken = [&taken] { return taken.has_value(); };
  mu_.Await(absl::Condition(&is_taken));
  return *std::move(taken);
}

void StepEngine::WakeSnapshot() {
  absl::MutexLock lock(&mu_);  // whoever waits looks at its condition again when this is released
}

absl::Status StepEngine::WaitRestored(const Moment& moment, const std::function<absl::Status()>& load) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&machine_, &StepMachine::BetweenSteps));
  if (absl::Status status = machine_.BeginRestore(); !status.ok()) return status;
  mu_.Unlock();  // loading takes long; nobody touches the state during maintenance
  const absl::Status status = load();
  mu_.Lock();
  bool done = false;
  machine_.EndRestore(status.ok() ? &moment : nullptr, [&done] { done = true; });
  mu_.Await(absl::Condition(&done));
  return status;
}

}  // namespace superoffload::engine
