// The steps of one optimizer: exact speculation by deferred commit.
//
//   at rest after step t-1:  state S(t-2), pending gradient g(t-1) with the verdict of t-1 applied
//   bucket of step t:        S(t-1) = Adam(S(t-2), g(t-1)) is written,
//                            Adam(S(t-1), g(t)).p is published, g(t) is pending
//   verdict COMMIT:          nothing to do for buckets that speculated
//   verdict CLIP(c):         Adam(S(t-1), c*g(t)).p is published instead; state is only read
//   verdict SKIP:            S(t-1).p is published instead; g(t) is dropped
//
// Every bucket is in one of these phases while a step is open:
//
//   kAbsent -> kQueued -> kNorming     -> kNormed      -> kUpdating     -> kFinal
//                      -> kSpeculating -> kSpeculated  -> (kUndoing ->)    kFinal
//
// A queued bucket speculates when the policy says so and the step has not ended; otherwise only its norm is taken and
// the update waits for the verdict, which is known once every bucket is normed or speculated. A bucket that came with
// its sum of squares needs no pass to be normed, and does not speculate when that sum is not finite. So no bucket is
// updated twice unless its speculation turned out wrong, and results never depend on which path a bucket took.
//
// Bookkeeping is per bucket, since a skipped step leaves some buckets with the pending gradient absorbed and others
// not. The slot that a step fills is always the one that no pending gradient lies in.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_STEP_ENGINE_H_
#define SUPEROFFLOAD_SERVER_ENGINE_STEP_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/bucket_pass.h"
#include "server/engine/layout.h"
#include "server/engine/record.h"
#include "server/engine/snapshot_gate.h"
#include "server/engine/spec.h"
#include "server/engine/speculation.h"
#include "server/engine/step_observer.h"
#include "server/engine/worker_pool.h"
#include "server/transport/transport.h"

namespace superoffload::engine {

struct StepStatistics {
  uint64_t step = 0;  // attempts, skipped ones included
  uint64_t committed_steps = 0;
  uint64_t commits = 0;
  uint64_t clips = 0;
  uint64_t skips_non_finite = 0;
  uint64_t skips_overflow = 0;
  uint64_t skips_abandoned = 0;
  uint64_t speculated_buckets = 0;
  uint64_t republished_buckets = 0;
  uint32_t consecutive_skips = 0;

  // Gradient slot that the next step fills.
  uint32_t next_slot() const { return SlotOf(committed_steps + 1); }
};

// Thread-safe. `layout`, `pool` and `observer` must outlive it; so must the memory, which nobody else writes but for
// the gradient slot of the open step. Memory that an engine of the same layout left behind, however its process ended,
// is brought to its last committed step first: state settled, a push that was cut off finished. Parameters are not
// published: a trainer that outlived that process may have changed them since.
class StepEngine final : public transport::StepHandler {
 public:
  StepEngine(const Layout* layout, std::vector<kernels::AdamHyperparameters> groups, const OptimizerMemory& memory,
             SpeculationPolicy policy, WorkerPool* pool, StepObserver* observer);

  // Detaches.
  ~StepEngine() override;

  // Completions go to `sink` from here until Detach. Only while detached.
  void Attach(transport::CompletionSink* sink);

  // Abandons the open step unless it has ended, waits until nothing runs, and forgets the sink.
  void Detach();

  // StepHandler. Hyper-parameters that SetGroup changes inside a step are revised for it.
  absl::Status SetGroup(uint32_t group, const transport::GroupUpdate& update) override;
  absl::Status BeginStep(uint64_t step, double gradient_scale) override;
  absl::Status GradientReady(uint64_t step, uint32_t bucket, std::optional<double> sum_of_squares) override;
  absl::Status EndStep(uint64_t step, double gradient_scale, double max_grad_norm) override;
  absl::Status AbandonStep(uint64_t step) override;
  absl::Status MeasureNorm(uint64_t step, double gradient_scale) override;

  // Absorbs all pending gradients: state is then that of the last committed step. Waits. FAILED_PRECONDITION while a
  // step is open.
  absl::Status WaitSettled();

  // Settles, then takes the parameters in memory as masters, but for those that masters narrow to: all of them, even if
  // the process ends in it. It completes an optimizer that was never filled. FAILED_PRECONDITION while a step is open.
  // DATA_LOSS: a restore was cut off.
  absl::Status WaitPushed();

  // Settles, then publishes the masters. FAILED_PRECONDITION while a step is open. DATA_LOSS: incomplete.
  absl::Status WaitPulled();

  // A snapshot: waits for the first moment between steps with at least `committed_steps` committed, settles there, and
  // returns what the engine then was. Steps go on, but no bucket's state is written before BucketSaved; until
  // EndSnapshot, which must follow, there is one snapshot at a time; whoever still waits for its moment holds nothing up.
  // FAILED_PRECONDITION, DATA_LOSS: the moment is now, and there is one, or the state is incomplete. ABORTED: a restore
  // has changed the number of steps meanwhile. CANCELLED: `cancelled` was set; call WakeSnapshot after setting it.
  struct Moment {
    StepStatistics statistics;
    std::vector<kernels::AdamHyperparameters> groups;
  };
  absl::StatusOr<Moment> WaitSnapshot(uint64_t committed_steps, const std::atomic<bool>& cancelled);
  std::optional<uint32_t> ClaimSnapshotBucket();  // the one to save next; by any thread
  void BucketSaved(uint32_t bucket);
  void EndSnapshot();
  void WakeSnapshot();

  // Has `load` overwrite the state with that of `moment`, and publishes it. When it fails, or the process ends in it,
  // the state is incomplete until another restore succeeds. Only while detached. FAILED_PRECONDITION: during a
  // snapshot.
  absl::Status WaitRestored(const Moment& moment, const std::function<absl::Status()>& load);

  // No step begins before the first push or restore. Only right after the creation.
  void AwaitFirstFill();

  // DATA_LOSS with the remedies when masters and moments are not whole. `before_push`: would a push complete them?
  absl::Status CheckComplete(bool before_push = false) const;
  Incompleteness incompleteness() const;

  void SetPolicy(SpeculationPolicy policy);
  SpeculationPolicy policy() const;
  std::vector<kernels::AdamHyperparameters> groups() const;
  StepStatistics statistics() const;

 private:
  enum class Phase : uint8_t {
    kAbsent,
    kQueued,
    kNorming,
    kNormed,
    kSpeculating,
    kSpeculated,
    kUpdating,
    kUndoing,
    kFinal
  };

  struct Bucket {
    Phase phase = Phase::kAbsent;
    std::optional<double> stated_sum;  // of squares, of the open step's gradient
    std::optional<PendingGradient> pending;
    std::unique_ptr<BucketPass> pass;
  };

  // The open step.
  struct Step {
    Step();  // out of line: clang cannot construct it within this class otherwise
    double gradient_scale = 1;
    double max_grad_norm = 0;
    bool speculate = false;
    bool ended = false;
    std::optional<double> norm_scale;  // a norm was asked for and not yet answered
    bool abandoned = false;
    std::optional<transport::VerdictReport> verdict;
    std::vector<kernels::AdamStep> speculative;  // per group, as of BEGIN_STEP
    std::vector<kernels::AdamStep> applied;      // per group, as of the verdict
    uint32_t arrived = 0;
    uint32_t measured = 0;    // buckets whose sum of squares is known
    uint32_t speculated = 0;  // buckets published before the verdict
    uint32_t to_finish = 0;   // passes that the verdict still needs
    uint64_t published_bytes = 0;
    absl::Time begin_time;
    absl::Time end_time;
  };

  // Whether more speculation would only be in the way of a verdict or a norm that waits for the last bucket.
  bool Hurry() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return open_->ended || open_->norm_scale.has_value(); }
  bool Speculates(const Bucket& bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsNormed(const Bucket& bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckAllHandedOver(const char* call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  double SumOfSquares() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MaybeAnswerNorm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckStepOpen(uint64_t step, const char* call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckNoStepOpen(const char* call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<kernels::AdamStep> StepConstants(double gradient_scale) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void Recover() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Push() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Completeness(bool before_push) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  PendingGradient Committed(uint32_t bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Abandon() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Does what can be done now.
  void Proceed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Starts passes while the pool should have more from this optimizer.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartPass(uint32_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnPassDone(uint32_t index) ABSL_LOCKS_EXCLUDED(mu_);
  void FinishPass(uint32_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Publish(uint32_t index, bool speculative) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MustKeepState(uint32_t index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Absorbed(uint32_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void MaybeDecide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  transport::VerdictReport Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountVerdict(transport::Verdict verdict) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ApplyVerdict() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MaybeClose() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Settles, then runs `then` on every bucket, between steps.
  absl::Status Maintain(const char* call, std::optional<PassKind> then);
  void RunMaintenance(PassKind kind) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return in_flight_ == 0 && ready_.empty() && !gate_.anybody_waits();
  }
  bool BetweenSteps() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !open_ && !maintenance_ && Idle(); }
  bool NotMaintained() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !maintenance_; }
  bool SnapshotDue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !gate_.closed() && !snapshots_due_.empty() && statistics_.committed_steps >= *snapshots_due_.begin();
  }
  bool MayBegin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !maintenance_ && !SnapshotDue(); }

  const Layout* const layout_;
  const OptimizerMemory memory_;
  Record record_;  // the workers write their parts of it; Commit is called with the lock held
  WorkerPool* const pool_;
  StepObserver* const observer_;

  mutable absl::Mutex mu_;
  std::vector<kernels::AdamHyperparameters> groups_ ABSL_GUARDED_BY(mu_);
  SpeculationPredictor predictor_ ABSL_GUARDED_BY(mu_);
  transport::CompletionSink* sink_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::vector<Bucket> buckets_ ABSL_GUARDED_BY(mu_);
  std::deque<uint32_t> ready_ ABSL_GUARDED_BY(mu_);  // buckets with a pass to start, in order of arrival
  uint32_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<Step> open_ ABSL_GUARDED_BY(mu_);
  std::optional<PassKind> maintenance_ ABSL_GUARDED_BY(mu_);   // what runs between steps; steps wait for its end
  std::multiset<uint64_t> snapshots_due_ ABSL_GUARDED_BY(mu_);  // committed steps that snapshots wait for
  uint64_t restores_ ABSL_GUARDED_BY(mu_) = 0;
  SnapshotGate gate_ ABSL_GUARDED_BY(mu_);
  StepStatistics statistics_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_STEP_ENGINE_H_
