// A daemon that is stopped gives its memory back. Where a directory is configured, every optimizer that has a name is
// checkpointed there first, and the next start has it again:
//
//   DIRECTORY/UID-NAME/checkpoint/     as CheckpointOptimizer writes it, but with the daemon's own rights
//   DIRECTORY/UID-NAME/optimizer       a serialized DurableOptimizer: the plan, the policies
//   DIRECTORY/.new-UID-NAME/           while it is written
//   DIRECTORY/.restored-UID-NAME/      once a start has it in memory again; goes with the optimizer, or its next stop
//
// An anonymous optimizer goes with its trainer, and is not kept.
#ifndef SUPEROFFLOAD_SERVER_HOST_STOP_CHECKPOINTS_H_
#define SUPEROFFLOAD_SERVER_HOST_STOP_CHECKPOINTS_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/checkpoint/scheduler.h"
#include "server/optimizer/optimizer_table.h"

namespace superoffload::host {

class StopCheckpoints {
 public:
  // Without a `directory` nothing is kept, and Write says what is dropped. `alive` is called every few seconds of work:
  // so much more time is needed.
  StopCheckpoints(std::string directory, absl::Duration time, std::function<void(absl::Duration)> alive)
      : directory_(std::move(directory)), time_(time), alive_(std::move(alive)) {}

  // Keeps what can be kept in the time, and logs the progress and what is dropped. No optimizer may be in use.
  void Write(const std::vector<optimizer::OptimizerPtr>& optimizers) const;

  // Hosts what a predecessor has kept, except for optimizers that are hosted already. What cannot be hosted stays, and
  // is logged.
  void Restore(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler) const;

  // The optimizer was deleted: the copy that its last restore has left goes, too.
  void Forget(const optimizer::OptimizerId& id) const;

 private:
  absl::Status WriteOne(const optimizer::OptimizerPtr& optimizer, absl::Time deadline) const;
  absl::Status RestoreOne(const std::string& entry, optimizer::OptimizerTable& table,
                          checkpoint::Scheduler& scheduler) const;
  std::string PathOf(const std::string& prefix, const optimizer::OptimizerId& id) const;

  const std::string directory_;
  const absl::Duration time_;
  const std::function<void(absl::Duration)> alive_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_STOP_CHECKPOINTS_H_
