// The steps of one optimizer as a state machine: exact speculation by deferred commit. It never waits and knows no
// thread; StepEngine (step_engine.h) puts a lock and the waiting around it.
//
//   at rest after step t-1:  state S(t-2), pending gradient g(t-1) with the verdict of t-1 applied
//   bucket of step t:        S(t-1) = next(S(t-2), g(t-1)) is written,
//                            next(S(t-1), g(t)).p is published, g(t) is pending
//   verdict COMMIT:          nothing to do for buckets that speculated
//   verdict CLIP(c):         next(S(t-1), c*g(t)).p is published instead; state is only read
//   verdict SKIP:            S(t-1).p is published instead; g(t) is dropped
//
// Every bucket is in one of these phases while a step is open:
//
//   kAwaited -> kQueued -> kNorming     -> kNormed      -> kUpdating     -> kFinal
//                       -> kSpeculating (-> kSpeculated) (-> kUndoing)  ->  kFinal
//
// Between and during steps idle workers absorb what is pending (kAwaited, kNormed, kFinal), so that little more than
// publishing is left when a bucket arrives or a verdict comes. Publishing goes first; a bucket that has to be published
// waits for its own absorbing only, which then is no longer work for idle workers. Of several buckets the last one goes
// first, before a verdict and after it: the next forward pass needs it first, and what is left over at the verdict is
// then what that pass needs last.
//
// A queued bucket speculates when the policy says so and the step has not ended; otherwise only its norm is taken and
// the update waits for the verdict, which is known once every bucket's sum of squares is. A bucket that came with its
// sum needs no pass to be normed, and does not speculate when that sum is not finite; while it speculates, the verdict
// does not wait for it, unless the step is skipped: then it has to be over, because who trains takes what was not
// published before such a verdict for unchanged. So no bucket is updated twice unless its speculation turned out wrong,
// and results never depend on which path a bucket took.
//
// Bookkeeping is per bucket, since a skipped step leaves some buckets with the pending gradient absorbed and others
// not. The slot that a step fills is always the one that no pending gradient lies in.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_STEP_MACHINE_H_
#define SUPEROFFLOAD_SERVER_ENGINE_STEP_MACHINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/bucket_pass.h"
#include "server/engine/layout.h"
#include "server/engine/platform.h"
#include "server/engine/record.h"
#include "server/engine/recovery.h"
#include "server/engine/snapshot_gate.h"
#include "server/engine/spec.h"
#include "server/engine/speculation.h"
#include "server/engine/step_contract.h"
#include "server/engine/step_observer.h"
#include "server/engine/step_terms.h"

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
  uint64_t restores = 0;        // all above count from the last one
  uint64_t restored_steps = 0;  // committed steps that it brought

  // Gradient slot that the next step fills.
  uint32_t next_slot() const { return SlotOf(committed_steps + 1); }
};

// Where a rank of a run is: what all ranks tell each other when they come together anew.
struct RunReport {
  uint64_t lineage = 0;
  uint64_t committed_steps = 0;
  Record::RunTerms last;  // of the last committed step
  std::optional<Record::Prepared> prepared;
};

// Whoever owns it calls it from one thread at a time, and calls PassDone from Done of a pass, on whatever thread the
// pool runs that. `layout`, `observer` and what `platform` names must outlive it; so must the memory, which nobody else
// writes but for the gradient slot of the open step. Whatever may be waited for is a question (MayBegin, MayMaintain,
// Idle) or has a callback, which runs within a later call and must not call back.
//
// Memory that an engine of the same layout left behind, however its process ended, is brought to its last committed
// step first: state settled, a push that was cut off finished. Parameters are not published: a trainer that outlived
// that process may have changed them since. That is the first maintenance, and begins with Recover.
class StepMachine final : public StepHandler {
 public:
  // `pass_done(pass)`: the workers have finished a pass; the owner calls PassDone with it.
  StepMachine(const Layout* layout, std::vector<Scalars> groups, const OptimizerMemory& memory,
              SpeculationPolicy policy, Platform platform, StepObserver* observer,
              std::function<void(uint32_t pass)> pass_done);

  // No pass may run. What it was in the middle of stays as a kill would leave it.
  ~StepMachine() override;
  StepMachine(const StepMachine&) = delete;
  StepMachine& operator=(const StepMachine&) = delete;

  // Of the optimizer: what failed checks name.
  void SetName(const std::string& name) { name_ = name; }

  // Completions go to `sink` from here until Detach. Only while detached.
  void Attach(CompletionSink* sink) { sink_ = sink; }

  // Forgets the sink, and abandons the open step unless it has ended or is prepared. A prepared one stays prepared but
  // is no longer open. Passes go on until BetweenSteps.
  void Detach();

  // What a trainer submits, as StepHandler has it. BeginStep needs MayBegin. Hyper-parameters that SetScalars changes
  // inside a step are revised for it.
  absl::Status SetScalars(uint32_t group, uint32_t first, std::span<const double> values) override;
  bool MayBegin() const { return !maintaining() && !SnapshotDue() && !HeldForSnapshot(); }
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

  void PassDone(uint32_t pass);

  // No step is open, nothing else goes on between steps, and no pass runs or waits.
  bool BetweenSteps() const { return !open_ && !maintaining() && Idle(); }

  // Before anything else. `done` runs when state is that of the last committed step.
  void Recover(std::function<void()> done);

  // Settling, pushing and pulling, as StepEngine's Wait... have it, and only while nothing of them goes on. `done` runs
  // at the end, before a step can begin.
  bool maintaining() const { return maintenance_.has_value(); }
  bool MayMaintain() const { return !maintaining(); }
  absl::Status Settle(uint32_t first_bucket, std::function<void()> done);
  absl::Status Push(std::function<void()> done);
  absl::Status Pull(std::function<void()> done);

  // Runs of several ranks (README.md). RequireTotals: every step is to be prepared, since this is a rank of several.
  // Report and what follows are for an agreement of all ranks, and FAILED_PRECONDITION while a step is open, so that
  // none ends between report and agreement, or when `attempt` is not what is prepared. CommitPrepared: `terms` are
  // those with which another rank has committed the step; INVALID_ARGUMENT when the step was prepared with others.
  void RequireTotals() { totals_required_ = true; }
  void SetLineage(uint64_t lineage) { record_.SetLineage(lineage); }
  absl::Status CheckNotPrepared(const char* call) const;
  std::optional<Record::Prepared> prepared() const { return record_.prepared(); }
  absl::StatusOr<RunReport> Report() const;
  absl::Status CommitPrepared(uint64_t attempt, const Record::RunTerms& terms, std::function<void()> done);
  absl::Status AbandonPrepared(uint64_t attempt);

  // StepEngine::WaitSnapshot; `done` may run within the call. Returns what CancelSnapshot takes.
  struct Moment {
    StepStatistics statistics;
    std::vector<Scalars> groups;
    std::vector<uint64_t> parameter_steps;  // committed ones in which the parameter had a gradient
  };
  struct SnapshotTime {
    uint64_t committed_steps = 0;  // the first moment with at least so many
    bool exact = false;  // with just so many; steps wait for a snapshot before it to end. OUT_OF_RANGE: too late
    uint64_t next = 0;   // of an exact one: once it is taken, no step begins after so many until the next request
  };
  using SnapshotDone = std::function<void(absl::StatusOr<Moment>)>;
  uint64_t RequestSnapshot(const SnapshotTime& time, SnapshotDone done);
  // Whether it was still waiting; then `done` does not run.
  bool CancelSnapshot(uint64_t request);
  void ForgetNextSnapshot();  // of SnapshotTime
  std::optional<uint32_t> ClaimSnapshotBucket() { return gate_.Claim(); }
  void BucketSaved(uint32_t bucket);
  void EndSnapshot();

  // Around what overwrites the state, which begins BetweenSteps: the state is incomplete until the end. `restored` is
  // what it then is, none when it failed. FAILED_PRECONDITION: during a snapshot.
  absl::Status BeginRestore();
  void EndRestore(const Moment* restored, std::function<void()> done);

  // No step begins before the first push or restore. Only right after the creation.
  void AwaitFirstFill() { record_.MarkNeverFilled(); }

  // DATA_LOSS with the remedies when masters and moments are not whole. `before_push`: would a push complete them?
  absl::Status CheckComplete(bool before_push) const;
  Incompleteness incompleteness() const { return record_.incompleteness(); }

  void SetPolicy(SpeculationPolicy policy) { predictor_.set_policy(policy); }
  SpeculationPolicy policy() const { return predictor_.policy(); }
  const std::vector<Scalars>& groups() const { return groups_; }
  std::vector<uint64_t> parameter_steps() const;
  const StepStatistics& statistics() const { return statistics_; }

 private:
  static constexpr uint32_t kRecoveryPass = ~uint32_t{0};  // every other pass has its bucket's number

  enum class Phase : uint8_t {
    kAwaited,
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
    Phase phase = Phase::kAwaited;
    std::optional<double> sum_of_squares;  // of the open step's gradient, once it is known
    // The committed steps whose gradients the state lacks, from first to last; 0: none. More than one, where there is a
    // log.
    uint64_t first_pending = 0, pending = 0;
    Landing landing = Landing::kSlot;  // of the open step's gradient
    bool absorbing = false;            // an early pass does that, on workers that are idle
    std::unique_ptr<BucketPass> pass;
  };

  // The open step.
  struct Step {
    Step();  // out of line: clang cannot construct it within this class otherwise
    double gradient_scale = 1;
    double max_grad_norm = 0;
    bool speculate = false;
    bool ended = false;
    bool preparing = false;
    bool prepared = false;
    bool parked = false;               // prepared, and nobody is there to end it: it is being closed
    std::optional<double> total;       // the sum of squares of all ranks
    std::optional<double> norm_scale;  // a norm was asked for and not yet answered
    bool abandoned = false;
    std::optional<VerdictReport> verdict;
    StepTerms speculative;     // as of BEGIN_STEP
    std::vector<bool> absent;  // by parameter; empty: every one has a gradient
    uint32_t arrived = 0;
    uint32_t measured = 0;   // buckets whose sum of squares is known
    uint32_t to_finish = 0;  // passes that the verdict still needs
    uint64_t published_bytes = 0;
    uint64_t streamed_bytes = 0;
    absl::Time begin_time;
    absl::Time end_time;
  };

  // What goes on between steps; steps wait for its end.
  struct Maintenance {
    Maintenance();                      // as Step's
    PassKind kind = PassKind::kAbsorb;  // of the passes that run now
    bool loading = false;               // somebody else writes the state
    std::deque<std::function<void()>> stages;
    std::function<void()> done;
  };

  struct SnapshotRequest {
    SnapshotTime time;
    SnapshotDone done;
  };

  // Whether more speculation would only be in the way of a verdict or a norm that waits for the last bucket.
  bool Hurry() const { return open_->ended || open_->preparing || open_->norm_scale.has_value(); }
  bool Speculates(const Bucket& bucket) const;
  bool IsNormed(const Bucket& bucket) const;
  bool TakeNorm(uint32_t index);  // whether it needed no pass
  absl::Status CheckAllSubmitted(const char* call) const;
  double SumOfSquares() const;
  void MaybeAnswerNorm();
  absl::Status CheckStepOpen(uint64_t step, const char* call) const;
  absl::Status CheckNoStepOpen(const char* call) const;
  StepValues Values(double gradient_scale) const;
  PassArguments ArgumentsOf(uint32_t index);
  // To absorb all that is pending, and nothing else.
  PassArguments AbsorbArguments(uint32_t index);
  std::optional<kernels::StepConstants> Committed(uint64_t t, uint32_t group, uint32_t parameter);
  std::optional<kernels::StepConstants> Speculative(uint32_t group, uint32_t parameter);

  using Stage = std::function<void()>;

  void Abandon();
  void DropPasses();  // those that have not started
  absl::Status CheckEnd(uint64_t step, const char* call, double gradient_scale, double max_grad_norm) const;
  absl::Status CheckAgreement(const char* call, uint64_t attempt) const;
  void End();
  void MaybePrepare();
  void MaybePark();
  Record::RunTerms OpenTerms(double sum_of_squares) const;
  Stage CommitPreparedStage(const Record::RunTerms& terms, const VerdictReport& report);
  void TellResolved(VerdictReport report) const;  // a prepared step has ended without a trainer

  // Does what can be done now.
  void Proceed();
  // Starts passes while the pool should have more from this optimizer.
  void Advance();
  void StartPass(uint32_t index);
  void FinishPass(uint32_t index);
  void FinishSpeculation(uint32_t index);
  void SetSum(Bucket& bucket, double sum_of_squares);
  void Enqueue(uint32_t index);  // its pass is to start
  // Has idle workers absorb what committed steps have left pending; between steps, no longer when somebody waits for
  // them to end.
  void AbsorbEarly();
  void StartAbsorbing(uint32_t index, bool when_idle);
  // Logs in turn, so that no step absorbs all, and whatever has one slot: before a gradient needs its room.
  void AbsorbDue();
  bool AbsorbsFirst(uint32_t index) const;
  bool HasLoggedPending(uint32_t index) const;
  absl::Status CheckLanding(uint32_t index, bool sum_known, Landing landing) const;
  void SetPending(uint32_t index, uint64_t t);
  std::vector<bool> LoggedBuckets() const;
  void HurryAbsorbing();
  void Leave(uint32_t index, Phase phase) const;  // it must be the bucket's
  void Commit(uint32_t index);
  void Finalize(uint32_t index);
  void Publish(uint32_t index, bool speculative);
  void TellPublished(uint32_t index, bool speculative);
  bool MustKeepState(uint32_t index) const;
  void Absorbed(uint32_t index);

  void MaybeDecide();
  bool LogsHaveRoom();
  VerdictReport Decide() const;
  static void DecideBySum(const Record::RunTerms& terms, VerdictReport& report);
  void CountVerdict(Verdict verdict);
  void ApplyVerdict();
  void MaybeClose();

  // Runs `stages` one after the other, each when the passes that the one before started have ended; then `done`.
  void Maintain(std::vector<Stage> stages, std::function<void()> done);
  Stage Passes(PassKind kind, uint32_t first_bucket = 0);  // over all buckets from that one on
  std::vector<Stage> PushStages();
  // Parameters that logs have left behind, of buckets from that one on, which have nothing pending.
  Stage PublishLoggedStage(uint32_t first_bucket);
  Stage MarkPublishedStage(uint32_t first_bucket = 0);
  void ProceedMaintenance();
  bool one_at_a_time() const { return layout_->algorithm->stages != nullptr; }  // passes: buckets share the directions
  bool Idle() const { return in_flight_ == 0 && ready_.empty() && held_.empty() && !gate_.anybody_waits(); }

  StepTerms& TermsOf(uint64_t t) { return committed_terms_[t % layout_->kept_steps]; }

  bool SnapshotDue() const;
  bool HeldForSnapshot() const;  // an exact one is of now, and another has yet to end
  void MaybeTakeSnapshot();

  const Layout* const layout_;
  const OptimizerMemory memory_;
  Record record_;  // the workers write their parts of it
  const Platform platform_;
  StepObserver* const observer_;
  const std::function<void(uint32_t)> pass_done_;

  std::string name_;
  std::vector<Scalars> groups_;
  std::vector<StepTerms> committed_terms_;  // of the last committed steps, t at t mod Layout::kept_steps
  SpeculationPredictor predictor_;
  CompletionSink* sink_ = nullptr;
  std::vector<Bucket> buckets_;
  std::set<uint32_t, std::greater<>> ready_;  // buckets with a pass to start, in the order of need: the last one first
  std::vector<uint32_t> held_;                // likewise, until their early absorbing has ended
  uint32_t early_ = 0;                        // buckets below it may have something to absorb early
  std::set<uint32_t> due_;  // that are to absorb now: the gradient that comes first needs its room first
  uint32_t in_flight_ = 0;
  uint32_t absorbing_ = 0;  // of in_flight_: early ones
  std::optional<Step> open_;
  std::optional<Maintenance> maintenance_;
  std::unique_ptr<RecoveryPass> recovery_;
  std::map<uint64_t, SnapshotRequest> snapshots_;  // that wait for their moment, by number
  uint64_t last_snapshot_ = 0;
  uint64_t next_snapshot_ = 0;  // SnapshotTime::next of the last one; 0: none
  bool totals_required_ = false;
  SnapshotGate gate_;
  StepStatistics statistics_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_STEP_MACHINE_H_
