// Takes checkpoints every so many steps, and removes old ones: those of the same run of the same optimizer that were
// written before the newest. The number of steps says nothing about age, since a run may go back, and what another run
// or optimizer has written is nobody else's to remove. A name that is taken gets a number: step-00001000-2.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULER_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULER_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
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
  explicit Scheduler(optimizer::OptimizerObserver* observer) : observer_(observer) {}

  ~Scheduler() { Shutdown(); }

  // Ends every schedule; cancels what is being written, and waits.
  void Shutdown();

  // INVALID_ARGUMENT: the directory is that of another optimizer's schedule.
  absl::Status CheckDirectory(const optimizer::OptimizerId& id, const Schedule& schedule) const;

  // Replaces the optimizer's schedule.
  void Set(const optimizer::OptimizerPtr& optimizer, const Schedule& schedule);
  Schedule Get(const optimizer::OptimizerId& id) const;

  // Ends the optimizer's schedule; a checkpoint that is being written is cancelled.
  void Forget(const optimizer::OptimizerId& id);

 private:
  struct Worker {
    optimizer::OptimizerPtr optimizer;
    Schedule schedule;
    std::atomic<bool> cancelled{false};
    std::thread thread;
  };

  void Run(Worker& worker) const;
  static void Stop(std::unique_ptr<Worker> worker);

  optimizer::OptimizerObserver* const observer_;
  mutable absl::Mutex mu_;
  std::map<optimizer::OptimizerId, std::unique_ptr<Worker>> workers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULER_H_
