#include "server/checkpoint/scheduler.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "server/checkpoint/act_as.h"
#include "server/checkpoint/index.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/writer.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kPrefix = "step-";
constexpr absl::Duration kPause = absl::Seconds(1);

// After a failure, e.g. of a full disk, the next attempt is one interval later.
uint64_t NextDue(uint64_t committed_steps, uint64_t every) { return (committed_steps / every + 1) * every; }

struct Scheduled {
  fs::path path;
  uint64_t sequence;
};

// "step-", the number of steps, and a further number where that name was taken.
bool IsScheduledName(absl::string_view name) {
  return absl::ConsumePrefix(&name, kPrefix) && !name.empty() &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) { return absl::ascii_isdigit(c) || c == '-'; });
}

// What this run of the optimizer has written by schedule, the oldest first.
std::vector<Scheduled> OwnCheckpoints(const std::string& directory, const optimizer::HostedOptimizer& optimizer) {
  std::error_code error;
  std::vector<Scheduled> own;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (!IsScheduledName(entry.path().filename().string())) continue;
    const absl::StatusOr<Index> index = ReadIndex(entry.path());
    if (!index.ok() || index->run != optimizer.run() || index->optimizer != optimizer.id().name) continue;
    if (index->sequence > 0) own.push_back({entry.path(), index->sequence});
  }
  std::sort(own.begin(), own.end(), [](const Scheduled& a, const Scheduled& b) { return a.sequence < b.sequence; });
  return own;
}

void Prune(const std::vector<Scheduled>& own, size_t keep) {
  std::error_code error;
  for (size_t i = 0; i + keep < own.size(); ++i) {
    fs::remove(own[i].path / kIndexFile, error);  // what is half removed is no checkpoint
    fs::remove_all(own[i].path, error);
  }
}

// That nothing in the directory has.
std::string FreeName(const std::string& directory, uint64_t committed_steps) {
  const std::string name = absl::StrFormat("%s/%s%08d", directory, kPrefix, committed_steps);
  std::string free = name;
  std::error_code error;
  for (int i = 2; fs::exists(fs::symlink_status(free, error)); ++i) free = absl::StrCat(name, "-", i);
  return free;
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

absl::Status Scheduler::CheckDirectory(const optimizer::OptimizerId& id, const Schedule& schedule) const {
  absl::MutexLock lock(&mu_);
  for (const auto& [other, worker] : workers_) {
    if (schedule.every_steps == 0 || other == id ||
        fs::path(worker->schedule.directory).lexically_normal() != fs::path(schedule.directory).lexically_normal()) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat("policies.checkpoint.directory ", schedule.directory,
                                                   " is that of optimizer \"", other.name,
                                                   "\"; give every optimizer, as every rank, a directory of its own"));
  }
  return absl::OkStatus();
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
  const auto next_due = [&] { return NextDue(optimizer.engine().statistics().committed_steps, schedule.every_steps); };
  for (uint64_t due = next_due(); !worker.cancelled;) {
    Progress progress;
    WriteOptions options;
    options.committed_steps = due;
    options.sequence = [&] {
      const std::vector<Scheduled> own = OwnCheckpoints(schedule.directory, optimizer);
      return own.empty() ? 1 : own.back().sequence + 1;
    };
    options.directory = [&](uint64_t committed_steps) { return FreeName(schedule.directory, committed_steps); };
    const optimizer::CheckpointReport report = WriteCheckpoint(optimizer, options, worker.cancelled, &progress);
    if (worker.cancelled) return;
    if (absl::IsFailedPrecondition(report.status) || absl::IsDataLoss(report.status)) {
      absl::SleepFor(kPause);  // somebody takes one by hand, or has yet to restore the optimizer
      continue;
    }
    due = next_due();
    if (absl::IsAborted(report.status)) continue;  // it was restored
    observer_->OnCheckpoint(optimizer.id(), report);
    if (report.status.ok() && schedule.keep > 0) Prune(OwnCheckpoints(schedule.directory, optimizer), schedule.keep);
  }
}

}  // namespace superoffload::checkpoint
