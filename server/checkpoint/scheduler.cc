#include "server/checkpoint/scheduler.h"

#include <filesystem>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/checkpoint/act_as.h"
#include "server/checkpoint/scheduled_checkpoints.h"
#include "server/checkpoint/task.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kPause = absl::Seconds(1);
constexpr absl::Duration kClaimPause = absl::Seconds(5);

}  // namespace

absl::Status ValidateSchedule(const Schedule& schedule) {
  if (schedule.every_steps == 0) return absl::OkStatus();
  if (schedule.directory.empty() || schedule.directory.front() != '/') {
    return absl::InvalidArgumentError(absl::StrCat("policies.checkpoint.directory is \"", schedule.directory,
                                                   "\" but must be an absolute path of a directory that exists"));
  }
  return absl::OkStatus();
}

class Scheduler::Worker {
 public:
  // `claim` on the directory, if a predecessor has it.
  Worker(optimizer::OptimizerPtr optimizer, Schedule schedule, std::shared_ptr<DirectoryClaim> claim,
         optimizer::OptimizerObserver* observer)
      : optimizer_(std::move(optimizer)),
        schedule_(std::move(schedule)),
        observer_(observer),
        restores_(optimizer_->engine().statistics().restores),
        due_(optimizer_->engine().statistics().committed_steps),
        claim_(std::move(claim)) {}

  // Cancels what is being written, and waits.
  ~Worker() {
    if (!thread_.joinable()) return;
    {
      absl::MutexLock lock(&mu_);
      ended_ = true;
      if (task_ != nullptr) task_->Cancel();
    }
    thread_.join();
  }

  absl::Status Start() {
    absl::StatusOr<std::thread> thread = memory::StartThread("so-schedule", [this] { Work(); });
    if (!thread.ok()) return thread.status();
    thread_ = *std::move(thread);
    return absl::OkStatus();
  }

  const Schedule& schedule() const { return schedule_; }

  // Whether its optimizer is another rank of that run.
  bool IsOtherRank(uid_t uid, const engine::RunMember& member) const {
    const engine::RunMember& mine = optimizer_->spec().member;
    return !member.run.empty() && optimizer_->id().uid == uid && mine.run == member.run && mine.rank != member.rank;
  }

  // OK when the directory is claimed, or nobody knows yet.
  absl::Status WaitClaimed(absl::Duration patience) const {
    absl::MutexLock lock(&mu_);
    const auto decided = [this] {
      mu_.AssertReaderHeld();
      return claim_ != nullptr || !refusal_.ok();
    };
    mu_.AwaitWithTimeout(absl::Condition(&decided), patience);
    return refusal_;
  }

  std::shared_ptr<DirectoryClaim> claim() const {
    absl::MutexLock lock(&mu_);
    return claim_;
  }

 private:
  void Work() {
    if (absl::Status status = ActAs(optimizer_->id().uid); !status.ok()) return ReportFailure(status);
    if (!Claim()) return;
    for (due_ = NextDue();;) {
      Progress progress;
      const std::optional<optimizer::CheckpointReport> report = Take(due_, &progress);
      if (!report) break;
      // A run's ranks leave none out: the next one is held from the moment of this one on.
      const uint64_t next = NextDue();
      due_ = IsOfRun() && progress.committed_steps == due_ ? due_ + schedule_.every_steps : next;
      if (absl::IsFailedPrecondition(report->status) || absl::IsDataLoss(report->status)) {
        absl::SleepFor(kPause);  // somebody has yet to restore the optimizer
        continue;
      }
      if (IsOfRun() && absl::IsOutOfRange(report->status)) continue;  // it has come further meanwhile
      if (absl::IsAborted(report->status)) continue;                  // it was restored
      observer_->OnCheckpoint(optimizer_->id(), *report);
      if (report->sealed) PruneRuns(report->directory, schedule_.keep, ReadScope::OfOwn(*optimizer_));
      if (!IsOfRun() && report->status.ok()) PruneScheduled(schedule_.directory, *optimizer_, schedule_.keep);
    }
    optimizer_->engine().ForgetNextSnapshot();
  }

  bool IsOfRun() const { return !optimizer_->spec().member.run.empty(); }

  // Tries until the directory is claimed. False once the schedule has ended.
  bool Claim() {
    for (bool first = true; claim() == nullptr; first = false) {
      absl::StatusOr<std::shared_ptr<DirectoryClaim>> claim =
          DirectoryClaim::Take(schedule_.directory, optimizer_->id().name,
                               IsOfRun() ? std::optional(optimizer_->spec().member.rank) : std::nullopt);
      absl::MutexLock lock(&mu_);
      refusal_ = claim.status();
      if (claim.ok()) {
        claim_ = *std::move(claim);
      } else if (mu_.AwaitWithTimeout(absl::Condition(&ended_), kClaimPause)) {
        return false;
      } else if (first) {
        ReportFailure(refusal_);
      }
    }
    return true;
  }

  // The report of the checkpoint of `due` committed steps; nothing once the schedule has ended.
  std::optional<optimizer::CheckpointReport> Take(uint64_t due, Progress* progress) {
    Task task(optimizer_, IsOfRun() ? RunOptions(due) : Options(due));
    if (!SetTask(&task)) return std::nullopt;
    task.Take();
    if (!SetTask(nullptr)) return std::nullopt;
    progress->committed_steps = task.progress().committed_steps.load();
    return task.report();
  }

  WriteOptions Options(uint64_t due) const {
    return {.committed_steps = due,
            .sequence = [this] { return NextSequence(schedule_.directory, *optimizer_); },
            .directory = [this](uint64_t steps) { return NewScheduled(schedule_.directory, steps); }};
  }

  WriteOptions RunOptions(uint64_t due) const {
    return {.committed_steps = due,
            .of_run = true,
            .next = due + schedule_.every_steps,
            .sequence =
                [this] {
                  return NextRunSequence(schedule_.directory, optimizer_->spec().member.run,
                                         ReadScope::OfOwn(*optimizer_));
                },
            .directory =
                [this](uint64_t steps) { return ScheduledRun(schedule_.directory, steps, optimizer_->lineage()); }};
  }

  // What the end of the schedule cancels. False once it has ended.
  bool SetTask(Task* task) {
    absl::MutexLock lock(&mu_);
    task_ = task;
    return !ended_;
  }

  // The first multiple of the interval after due_ that training has not gone past, so also after a failure, e.g. of a
  // full disk; or after where it went back to since the last call, however far it has come again.
  uint64_t NextDue() {
    const engine::StepStatistics now = optimizer_->engine().statistics();
    const bool went_back = std::exchange(restores_, now.restores) != now.restores;
    const uint64_t steps = went_back ? now.restored_steps : now.committed_steps;
    const bool is_due = !went_back && steps > due_ && steps % schedule_.every_steps == 0;
    return is_due ? steps : (steps / schedule_.every_steps + 1) * schedule_.every_steps;
  }

  void ReportFailure(const absl::Status& status) const {
    observer_->OnCheckpoint(optimizer_->id(), {status, schedule_.directory, 0, 0, absl::ZeroDuration()});
  }

  const optimizer::OptimizerPtr optimizer_;
  const Schedule schedule_;
  optimizer::OptimizerObserver* const observer_;
  uint64_t restores_;  // that NextDue has seen
  uint64_t due_;       // steps of the checkpoint that is waited for or taken; at first, those that were committed
  mutable absl::Mutex mu_;
  std::shared_ptr<DirectoryClaim> claim_ ABSL_GUARDED_BY(mu_);
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);  // while it cannot be claimed
  Task* task_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

Scheduler::Scheduler(optimizer::OptimizerObserver* observer) : observer_(observer) {}

Scheduler::~Scheduler() { Shutdown(); }

void Scheduler::Shutdown() {
  std::map<optimizer::OptimizerId, std::unique_ptr<Worker>> workers;  // ended once the lock is released
  absl::MutexLock lock(&mu_);
  ended_ = true;
  workers.swap(workers_);
}

absl::Status Scheduler::CheckDirectory(const optimizer::OptimizerId& id, const engine::RunMember& member,
                                       const Schedule& schedule) const {
  absl::MutexLock lock(&mu_);
  for (const auto& [other, worker] : workers_) {
    if (schedule.every_steps == 0 || other == id || worker->IsOtherRank(id.uid, member) ||
        fs::path(worker->schedule().directory).lexically_normal() != fs::path(schedule.directory).lexically_normal()) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat("policies.checkpoint.directory ", schedule.directory,
                                                   " is that of optimizer \"", other.name,
                                                   "\"; give every optimizer, as every run, a directory of its own"));
  }
  return absl::OkStatus();
}

absl::Status Scheduler::Set(const optimizer::OptimizerPtr& optimizer, const Schedule& schedule,
                            absl::Duration patience) {
  if (Get(optimizer->id()) == schedule) return absl::OkStatus();
  std::unique_ptr<Worker> worker;
  if (schedule.every_steps > 0) {
    worker = std::make_unique<Worker>(optimizer, schedule, ClaimOf(optimizer->id(), schedule.directory), observer_);
    if (absl::Status status = worker->Start(); !status.ok()) {
      observer_->OnCheckpoint(optimizer->id(), {status, schedule.directory, 0, 0, absl::ZeroDuration()});
      worker.reset();
    } else if (status = worker->WaitClaimed(patience); !status.ok() && patience > absl::ZeroDuration()) {
      return status;
    }
  }
  Replace(optimizer->id(), std::move(worker));
  return absl::OkStatus();
}

std::shared_ptr<DirectoryClaim> Scheduler::ClaimOf(const optimizer::OptimizerId& id,
                                                   const std::string& directory) const {
  absl::MutexLock lock(&mu_);
  const auto found = workers_.find(id);
  if (found == workers_.end() || found->second->schedule().directory != directory) return nullptr;
  return found->second->claim();
}

Schedule Scheduler::Get(const optimizer::OptimizerId& id) const {
  absl::MutexLock lock(&mu_);
  const auto found = workers_.find(id);
  return found == workers_.end() ? Schedule{} : found->second->schedule();
}

void Scheduler::Forget(const optimizer::OptimizerId& id) { Replace(id, nullptr); }

void Scheduler::Replace(const optimizer::OptimizerId& id, std::unique_ptr<Worker> worker) {
  std::unique_ptr<Worker> last;  // ended once the lock is released
  absl::MutexLock lock(&mu_);
  const auto found = workers_.find(id);
  if (found != workers_.end()) last = std::move(found->second);
  if (worker != nullptr && !ended_) {
    workers_[id] = std::move(worker);
  } else if (found != workers_.end()) {
    workers_.erase(found);
  }
}

}  // namespace superoffload::checkpoint
