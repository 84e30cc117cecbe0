#include "server/checkpoint/task.h"

#include <utility>

#include "absl/status/statusor.h"
#include "kernels/base/check.h"
#include "server/checkpoint/act_as.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {

Task::~Task() {
  if (!thread_.joinable()) return;
  Cancel();
  thread_.join();
}

const optimizer::CheckpointReport& Task::Take() {
  SUPEROFFLOAD_CHECK(!end_.HasBeenNotified(), "a checkpoint of ", optimizer_->id().name, " is taken twice");
  const CheckScope scope(optimizer_->id().name, options_.committed_steps);
  report_ = WriteCheckpoint(*optimizer_, options_, cancelled_, &progress_);
  end_.Notify();
  return report_;
}

absl::Status Task::Start() {
  SUPEROFFLOAD_CHECK(!thread_.joinable(), "a checkpoint of ", optimizer_->id().name, " is started twice");
  absl::StatusOr<std::thread> thread = memory::StartThread("so-checkpoint", [this] {
    if (options_.as_user) report_.status = ActAs(optimizer_->id().uid);
    if (report_.status.ok()) {
      Take();
    } else {
      end_.Notify();
    }
  });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

const optimizer::CheckpointReport& Task::report() const {
  SUPEROFFLOAD_CHECK(end_.HasBeenNotified(), "a checkpoint of ", optimizer_->id().name, " has not ended");
  return report_;
}

void Task::Cancel() {
  if (!cancelled_.exchange(true)) optimizer_->engine().WakeSnapshot();
}

}  // namespace superoffload::checkpoint
