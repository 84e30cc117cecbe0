#include "server/checkpoint/scheduler.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/checkpoint/act_as.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/writer.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kPrefix = "step-";
constexpr absl::Duration kPause = absl::Seconds(1);

// After a failure, e.g. of a full disk, the next attempt is one interval later.
uint64_t NextDue(uint64_t committed_steps, uint64_t every) { return (committed_steps / every + 1) * every; }

bool IsScheduledCheckpoint(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename();
  std::error_code error;
  return absl::StartsWith(name, kPrefix) &&
         std::all_of(name.begin() + kPrefix.size(), name.end(), absl::ascii_isdigit) &&
         fs::is_regular_file(entry.path() / kIndexFile, error);
}

// Keeps the newest.
void Prune(const std::string& directory, size_t keep) {
  std::error_code error;
  std::vector<fs::path> checkpoints;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (IsScheduledCheckpoint(entry)) checkpoints.push_back(entry.path());
  }
  std::sort(checkpoints.begin(), checkpoints.end());  // digits are padded
  for (size_t i = 0; i + keep < checkpoints.size(); ++i) {
    fs::remove(checkpoints[i] / kIndexFile, error);  // what is half removed is no checkpoint
    fs::remove_all(checkpoints[i], error);
  }
}

}  // namespace

absl::Status ValidateSchedule(const Schedule& schedule) {
  if (schedule.every_steps == 0) return absl::OkStatus();
  if (schedule.directory.empty() || schedule.directory.front() != '/') {
    return absl::InvalidArgumentError(absl::StrCat("policies.checkpoint.directory is \"", schedule.directory,
                                                   "\" but must be an absolute path of a directory that exists"));
  }
  return absl::OkStatus();
}

void Scheduler::Shutdown() {
  std::map<optimizer::OptimizerId, std::unique_ptr<Worker>> workers;
  {
    absl::MutexLock lock(&mu_);
    workers.swap(workers_);
  }
  for (auto& [id, worker] : workers) Stop(std::move(worker));
}

void Scheduler::Set(const optimizer::OptimizerPtr& optimizer, const Schedule& schedule) {
  if (Get(optimizer->id()) == schedule) return;
  Forget(optimizer->id());
  if (schedule.every_steps == 0) return;
  auto worker = std::make_unique<Worker>();
  worker->optimizer = optimizer;
  worker->schedule = schedule;
  absl::StatusOr<std::thread> thread =
      memory::StartThread("so-checkpoint", [this, &worker = *worker] { Run(worker); });
  if (!thread.ok()) {
    observer_->OnCheckpoint(optimizer->id(), {thread.status(), schedule.directory, 0, 0, absl::ZeroDuration()});
    return;
  }
  worker->thread = *std::move(thread);
  absl::MutexLock lock(&mu_);
  workers_[optimizer->id()] = std::move(worker);
}

Schedule Scheduler::Get(const optimizer::OptimizerId& id) const {
  absl::MutexLock lock(&mu_);
  const auto found = workers_.find(id);
  return found == workers_.end() ? Schedule{} : found->second->schedule;
}

void Scheduler::Forget(const optimizer::OptimizerId& id) {
  std::unique_ptr<Worker> worker;
  {
    absl::MutexLock lock(&mu_);
    const auto found = workers_.find(id);
    if (found == workers_.end()) return;
    worker = std::move(found->second);
    workers_.erase(found);
  }
  Stop(std::move(worker));
}

void Scheduler::Stop(std::unique_ptr<Worker> worker) {
  worker->cancelled = true;
  worker->optimizer->engine().WakeSnapshot();
  worker->thread.join();
}

void Scheduler::Run(Worker& worker) const {
  optimizer::HostedOptimizer& optimizer = *worker.optimizer;
  const Schedule& schedule = worker.schedule;
  if (absl::Status status = ActAs(optimizer.id().uid); !status.ok()) {
    observer_->OnCheckpoint(optimizer.id(), {status, schedule.directory, 0, 0, absl::ZeroDuration()});
    return;
  }
  while (!worker.cancelled) {
    Progress progress;
    WriteOptions options;
    options.committed_steps = NextDue(optimizer.engine().statistics().committed_steps, schedule.every_steps);
    options.directory = [&schedule](uint64_t committed_steps) {
      return absl::StrFormat("%s/%s%08d", schedule.directory, kPrefix, committed_steps);
    };
    const optimizer::CheckpointReport report = WriteCheckpoint(optimizer, options, worker.cancelled, &progress);
    if (worker.cancelled) return;
    observer_->OnCheckpoint(optimizer.id(), report);
    if (report.status.ok() && schedule.keep > 0) Prune(schedule.directory, schedule.keep);
    if (absl::IsFailedPrecondition(report.status)) absl::SleepFor(kPause);  // somebody takes one by hand
    if (absl::IsDataLoss(report.status)) return;
  }
}

}  // namespace superoffload::checkpoint
