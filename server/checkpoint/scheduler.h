// Takes checkpoints every so many steps, and removes old ones: those of the same run of the same optimizer that were
// written before the newest. The number of steps says nothing about age, since a run may go back, and what another run
// or optimizer has written is nobody else's to remove. A name that is taken gets a number: step-00001000-2.
// The ranks of a run write theirs together, every one of them (scheduled_checkpoints.h).
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULER_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/checkpoint/directory_claim.h"
#include "server/optimizer/optimizer_table.h"

namespace superoffload::checkpoint {

struct Schedule {
  uint64_t every_steps = 0;  // committed ones; 0 means never
  uint32_t keep = 0;         // checkpoints that stay; 0 means all
  std::string directory;     // absolute; must exist; checkpoints are its step-00001000, ...

  bool operator==(const Schedule&) const = default;
};

// INVALID_ARGUMENT names the field.
absl::Status ValidateSchedule(const Schedule& schedule);

// Thread-safe.
class Scheduler {
 public:
  // Tells `observer`, which must outlive it, of every checkpoint.
  explicit Scheduler(optimizer::OptimizerObserver* observer);

  ~Scheduler();

  // Ends every schedule, for good; cancels what is being written, and waits.
  void Shutdown();

  // INVALID_ARGUMENT: the directory is that of another optimizer's schedule;
  // other ranks of the run that `member` is of may have it.
  absl::Status CheckDirectory(const optimizer::OptimizerId& id, const engine::RunMember& member,
                              const Schedule& schedule) const;

  // Replaces the optimizer's schedule. A checkpoint that is being written by the old one is cancelled.
  // FAILED_PRECONDITION: within `patience` (a file system may take long) the directory turned out to be that of another
  // daemon's schedule; the old schedule stays. One that turns out so later is tried again, and reported.
  absl::Status Set(const optimizer::OptimizerPtr& optimizer, const Schedule& schedule,
                   absl::Duration patience = absl::ZeroDuration());
  Schedule Get(const optimizer::OptimizerId& id) const;

  // Ends the optimizer's schedule; a checkpoint that is being written is cancelled.
  void Forget(const optimizer::OptimizerId& id);

 private:
  // Takes the checkpoints of one optimizer, in a thread of its own.
  class Worker;

  // What the optimizer's present schedule has of that directory, if it is its own.
  std::shared_ptr<DirectoryClaim> ClaimOf(const optimizer::OptimizerId& id, const std::string& directory) const;

  // The optimizer has this worker from here on, or none; the last one has ended on return.
  void Replace(const optimizer::OptimizerId& id, std::unique_ptr<Worker> worker);

  optimizer::OptimizerObserver* const observer_;
  mutable absl::Mutex mu_;
  std::map<optimizer::OptimizerId, std::unique_ptr<Worker>> workers_ ABSL_GUARDED_BY(mu_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULER_H_
