// The engine of one optimizer: a StepMachine behind a lock, and whoever has to wait for it.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_STEP_ENGINE_H_
#define SUPEROFFLOAD_SERVER_ENGINE_STEP_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/step_machine.h"

namespace superoffload::engine {

// Thread-safe. See StepMachine for what must outlive it, and for the recovery that the constructor waits for.
class StepEngine final : public StepHandler {
 public:
  using Moment = StepMachine::Moment;

  StepEngine(const Layout* layout, std::vector<Scalars> groups, const OptimizerMemory& memory, SpeculationPolicy policy,
             Platform platform, StepObserver* observer);

  // Detaches.
  ~StepEngine() override;

  // Of the optimizer: what failed checks name.
  void SetName(const std::string& name) { Locked(&StepMachine::SetName, name); }

  // Completions go to `sink` from here until Detach. Only while detached.
  void Attach(CompletionSink* sink) { Locked(&StepMachine::Attach, sink); }

  // Abandons the open step unless it has ended or is prepared, waits until nothing runs, and forgets the sink.
  void Detach();

  // StepHandler. BeginStep waits for what goes on between steps.
  absl::Status SetScalars(uint32_t group, uint32_t first, std::span<const double> values) override;
  absl::Status BeginStep(uint64_t step, double gradient_scale) override;
  absl::Status ParametersAbsent(uint64_t step, uint32_t first, uint32_t count) override;
  absl::Status GradientReady(uint64_t step, uint32_t bucket, std::optional<double> sum_of_squares,
                             Landing landing = Landing::kSlot) override;
  absl::Status EndStep(uint64_t step, double gradient_scale, double max_grad_norm,
                       uint64_t streamed_bytes = 0) override;
  absl::Status PrepareStep(uint64_t step, double gradient_scale, double max_grad_norm) override;
  absl::Status EndPreparedStep(uint64_t step, double gradient_scale, double max_grad_norm,
                               const RunTotal& total) override;
  absl::Status AbandonStep(uint64_t step) override;
  absl::Status MeasureNorm(uint64_t step, double gradient_scale) override;

  // Runs of several ranks, while no step is open; see StepMachine.
  void RequireTotals() { Locked(&StepMachine::RequireTotals); }
  void SetLineage(uint64_t lineage) { Locked(&StepMachine::SetLineage, lineage); }
  absl::Status CheckNotPrepared(const char* call) const { return Locked(&StepMachine::CheckNotPrepared, call); }
  std::optional<Record::Prepared> prepared() const { return Locked(&StepMachine::prepared); }
  absl::StatusOr<RunReport> WaitReported();
  absl::Status WaitPreparedCommitted(uint64_t attempt, const Record::RunTerms& terms) {
    return WaitMaintained([attempt, &terms](StepMachine& machine, std::function<void()> done) {
      return machine.CommitPrepared(attempt, terms, std::move(done));
    });
  }
  absl::Status WaitPreparedAbandoned(uint64_t attempt);

  // Absorbs all pending gradients of the buckets from `first_bucket` on: their state is then that of the last committed
  // step. Waits. FAILED_PRECONDITION while a step is open.
  absl::Status WaitSettled(uint32_t first_bucket = 0) {
    return WaitMaintained([first_bucket](StepMachine& machine, std::function<void()> done) {
      return machine.Settle(first_bucket, std::move(done));
    });
  }

  // Settles, then takes the parameters in memory as masters, but for those that masters narrow to: all of them, even if
  // the process ends in it. It completes an optimizer that was never filled. FAILED_PRECONDITION while a step is open.
  // DATA_LOSS: a restore was cut off.
  absl::Status WaitPushed() { return WaitMaintained(&StepMachine::Push); }

  // Settles, then publishes the masters. FAILED_PRECONDITION while a step is open. DATA_LOSS: incomplete.
  absl::Status WaitPulled() { return WaitMaintained(&StepMachine::Pull); }

  // A snapshot: waits for the first moment between steps with at least `committed_steps` committed, settles there, and
  // returns what the engine then was. Steps go on, but no bucket's state is written before BucketSaved; until
  // EndSnapshot, which must follow, there is one snapshot at a time; others wait for its end. Whoever still waits for
  // its moment holds nothing up. DATA_LOSS: the moment is now, and the state is incomplete. ABORTED: a restore has
  // changed the number of steps meanwhile. CANCELLED: `cancelled` was set; call WakeSnapshot after setting it.
  // OUT_OF_RANGE: `exact`, and too late.
  absl::StatusOr<Moment> WaitSnapshot(const StepMachine::SnapshotTime& time, const std::atomic<bool>& cancelled);
  absl::StatusOr<Moment> WaitSnapshot(uint64_t committed_steps, const std::atomic<bool>& cancelled) {
    return WaitSnapshot(StepMachine::SnapshotTime{.committed_steps = committed_steps}, cancelled);
  }
  void ForgetNextSnapshot() { Locked(&StepMachine::ForgetNextSnapshot); }  // of StepMachine::SnapshotTime
  std::optional<uint32_t> ClaimSnapshotBucket() {                          // the one to save next; by any thread
    return Locked(&StepMachine::ClaimSnapshotBucket);
  }
  void BucketSaved(uint32_t bucket) { Locked(&StepMachine::BucketSaved, bucket); }
  void EndSnapshot() { Locked(&StepMachine::EndSnapshot); }
  void WakeSnapshot();

  // Has `load` overwrite the state with that of `moment`, and publishes it. When it fails, or the process ends in it,
  // the state is incomplete until another restore succeeds. Only while detached. FAILED_PRECONDITION: during a
  // snapshot.
  absl::Status WaitRestored(const Moment& moment, const std::function<absl::Status()>& load);

  // No step begins before the first push or restore. Only right after the creation.
  void AwaitFirstFill() { Locked(&StepMachine::AwaitFirstFill); }

  // DATA_LOSS with the remedies when masters and moments are not whole. `before_push`: would a push complete them?
  absl::Status CheckComplete(bool before_push = false) const {
    return Locked(&StepMachine::CheckComplete, before_push);
  }
  Incompleteness incompleteness() const { return Locked(&StepMachine::incompleteness); }

  void SetPolicy(SpeculationPolicy policy) { Locked(&StepMachine::SetPolicy, policy); }
  SpeculationPolicy policy() const { return Locked(&StepMachine::policy); }
  std::vector<Scalars> groups() const { return Locked(&StepMachine::groups); }
  std::vector<uint64_t> parameter_steps() const { return Locked(&StepMachine::parameter_steps); }
  StepStatistics statistics() const { return Locked(&StepMachine::statistics); }

 private:
  using Maintenance = std::function<absl::Status(StepMachine&, std::function<void()> done)>;
  absl::Status WaitMaintained(const Maintenance& maintain);

  // What needs the lock and waits for nothing. What it returns is a copy: nothing of the machine leaves the lock.
  template <typename Result, typename... Parameters, typename... Arguments>
  std::decay_t<Result> Locked(Result (StepMachine::*method)(Parameters...), const Arguments&... arguments) {
    absl::MutexLock lock(&mu_);
    return (machine_.*method)(arguments...);
  }
  template <typename Result, typename... Parameters, typename... Arguments>
  std::decay_t<Result> Locked(Result (StepMachine::*method)(Parameters...) const, const Arguments&... arguments) const {
    absl::MutexLock lock(&mu_);
    return (machine_.*method)(arguments...);
  }

  mutable absl::Mutex mu_;
  StepMachine machine_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_STEP_ENGINE_H_
