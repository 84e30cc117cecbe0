#include "server/host/stop_checkpoints.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/checkpoint/files.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/task.h"
#include "server/host/log.h"
#include "server/host/owned_directory.h"
#include "server/rpc/durable.h"
#include "server/rpc/from_proto.h"

namespace superoffload::host {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kProgressInterval = absl::Seconds(5);
constexpr absl::Duration kExtension = absl::Seconds(30);  // over the next call of `alive`
constexpr char kDescriptionFile[] = "optimizer";
constexpr char kCheckpointDirectory[] = "checkpoint";

std::string Name(const optimizer::OptimizerId& id) {
  return absl::StrCat("optimizer \"", id.name, "\" of uid ", id.uid);
}

double Gigabytes(uint64_t bytes) { return static_cast<double>(bytes) / 1e9; }

absl::Status WriteDescription(const std::string& directory, const std::string& text) {
  absl::StatusOr<checkpoint::File> file = checkpoint::File::Create(absl::StrCat(directory, "/", kDescriptionFile), 0);
  if (!file.ok()) return file.status();
  if (absl::Status status = file->WriteAt(0, text.data(), text.size()); !status.ok()) return status;
  return file->Sync();
}

absl::StatusOr<std::string> ReadDescription(const std::string& directory) {
  absl::StatusOr<checkpoint::File> file = checkpoint::File::Open(absl::StrCat(directory, "/", kDescriptionFile));
  if (!file.ok()) return file.status();
  absl::StatusOr<uint64_t> bytes = file->Bytes();
  if (!bytes.ok()) return bytes.status();
  std::string text(*bytes, '\0');
  if (absl::Status status = file->ReadAt(0, text.data(), text.size()); !status.ok()) return status;
  return text;
}

// What had the name before is removed once this has it.
absl::Status MoveInto(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    std::error_code ignored;
    fs::remove_all(from, ignored);
    return absl::OkStatus();
  }
  if (::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return checkpoint::FileError(errno, "renaming to", to);
}

}  // namespace

std::string StopCheckpoints::PathOf(const std::string& prefix, const optimizer::OptimizerId& id) const {
  return absl::StrCat(directory_, "/", prefix, id.uid, "-", id.name);
}

void StopCheckpoints::Write(const std::vector<optimizer::OptimizerPtr>& optimizers) const {
  const absl::Time deadline = absl::Now() + time_;
  for (const optimizer::OptimizerPtr& optimizer : optimizers) {
    absl::StatusOr<v1::DurableOptimizer> durable = rpc::ReadDurable(optimizer->memory());
    if (durable.ok() && durable->request().anonymous()) continue;
    absl::Status status =
        directory_.empty() ? absl::FailedPreconditionError("stop_checkpoints is not configured") : durable.status();
    if (status.ok()) status = WriteOne(optimizer, deadline);
    if (status.ok()) {
      LogInfo(absl::StrCat(Name(optimizer->id()), " is kept in ", PathOf("", optimizer->id()),
                           "; the next start has it again"));
    } else {
      LogWarning(absl::StrFormat("%s is dropped at step %d (%.2f GB): %s", Name(optimizer->id()),
                                 optimizer->engine().statistics().committed_steps, Gigabytes(optimizer->memory_bytes()),
                                 status.message()));
    }
  }
}

absl::Status StopCheckpoints::WriteOne(const optimizer::OptimizerPtr& optimizer, absl::Time deadline) const {
  if (absl::Now() >= deadline) {
    return absl::DeadlineExceededError("the time of stop_checkpoints is over; give it more seconds or a faster disk");
  }
  if (auto opened = OpenOwnedDirectory("stop_checkpoints.directory", directory_, 0700); !opened.ok()) {
    return opened.status();
  }
  const optimizer::OptimizerId& id = optimizer->id();
  const std::string place = PathOf(".new-", id);
  std::error_code ignored;
  fs::remove_all(place, ignored);
  if (::mkdir(place.c_str(), 0700) != 0) return checkpoint::FileError(errno, "creating", place);
  checkpoint::Task task(
      optimizer,
      {.directory = [&](uint64_t) { return absl::StrCat(place, "/", kCheckpointDirectory); }, .as_user = false});
  if (absl::Status status = task.Start(); !status.ok()) return status;
  do {
    alive_(kExtension);
    if (task.progress().bytes_written > 0) {
      LogInfo(absl::StrFormat("keeping %s: %.2f of %.2f GB are written", Name(id),
                              Gigabytes(task.progress().bytes_written), Gigabytes(task.progress().bytes_total)));
    }
    if (absl::Now() >= deadline) task.Cancel();
  } while (!task.WaitEnd(std::max(std::min(kProgressInterval, deadline - absl::Now()), absl::Milliseconds(100))));
  absl::Status status = task.report().status;
  const absl::StatusOr<std::string> description = optimizer->memory().Description();
  if (status.ok()) status = description.status();
  if (status.ok()) status = WriteDescription(place, *description);
  if (status.ok()) status = checkpoint::SyncDirectory(place);
  if (status.ok()) status = MoveInto(place, PathOf("", id));
  if (status.ok()) status = checkpoint::SyncDirectory(directory_);
  fs::remove_all(status.ok() ? PathOf(".restored-", id) : place, ignored);
  if (absl::IsCancelled(status)) {
    status = absl::DeadlineExceededError("the time of stop_checkpoints did not suffice; give it more seconds");
  }
  return status;
}

void StopCheckpoints::Forget(const optimizer::OptimizerId& id) const {
  std::error_code ignored;
  if (!directory_.empty()) fs::remove_all(PathOf(".restored-", id), ignored);
}

void StopCheckpoints::Restore(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler) const {
  if (directory_.empty()) return;
  if (auto opened = OpenOwnedDirectory("stop_checkpoints.directory", directory_, 0700); !opened.ok()) {
    LogError(absl::StrCat("what a stop has kept cannot be had again: ", opened.status().message()));
    return;
  }
  std::error_code error;
  std::vector<std::string> entries;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory_, error)) {
    if (absl::ascii_isdigit(static_cast<unsigned char>(entry.path().filename().native().front()))) {
      entries.push_back(entry.path());
    }
  }
  std::sort(entries.begin(), entries.end());
  for (const std::string& entry : entries) {
    alive_(time_);
    if (absl::Status status = RestoreOne(entry, table, scheduler); !status.ok()) {
      LogError(absl::StrCat("what a stop has kept in ", entry, " stays there: ", status.message()));
    }
  }
}

absl::Status StopCheckpoints::RestoreOne(const std::string& entry, optimizer::OptimizerTable& table,
                                         checkpoint::Scheduler& scheduler) const {
  const absl::StatusOr<std::string> description = ReadDescription(entry);
  if (!description.ok()) return description.status();
  v1::DurableOptimizer durable;
  if (!durable.ParseFromString(*description)) return absl::DataLossError("its description is damaged");
  const std::string unique_id = durable.id().empty() ? optimizer::NewUniqueId() : durable.id();
  const absl::StatusOr<engine::OptimizerSpec> spec = rpc::ToSpec(durable.request());
  if (!spec.ok()) return spec.status();
  const absl::StatusOr<rpc::Policies> policies = rpc::ToPolicies(durable.request().policies());
  if (!policies.ok()) return policies.status();
  const transport::Peer owner{.session = 0, .uid = durable.uid(), .pid = 0, .is_operator = false};
  const std::string& name = durable.request().name();
  absl::StatusOr<optimizer::OptimizerPtr> created = table.Create(
      owner, name, *spec, policies->speculation, rpc::Describe(durable.uid(), durable.request(), unique_id), unique_id);
  if (!created.ok()) return created.status();
  absl::StatusOr<uint64_t> epoch = table.NewEpoch();
  if (!epoch.ok()) return epoch.status();
  const absl::StatusOr<checkpoint::Restored> restored = checkpoint::RestoreCheckpoint(
      **created, {*epoch, owner, std::nullopt}, {.directories = {absl::StrCat(entry, "/", kCheckpointDirectory)}});
  if (!restored.ok()) {
    table.Delete(owner, name).IgnoreError();
    return restored.status();
  }
  rpc::ApplyPolicies(table, scheduler, *created, *policies, /*patience=*/absl::ZeroDuration())
      .IgnoreError();  // cannot fail
  const optimizer::OptimizerId id{durable.uid(), name};
  LogInfo(absl::StrFormat("%s is back at step %d, where a stop has kept it", Name(id),
                          (*created)->engine().statistics().committed_steps));
  return MoveInto(entry, PathOf(".restored-", id));
}

}  // namespace superoffload::host
