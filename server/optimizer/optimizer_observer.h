// What hosted optimizers tell metrics and watchers.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_OPTIMIZER_OBSERVER_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_OPTIMIZER_OBSERVER_H_

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/spec.h"
#include "server/engine/step_observer.h"

namespace superoffload::optimizer {

// Names an optimizer within the daemon: users have their own name spaces.
struct OptimizerId {
  uid_t uid = 0;
  std::string name;

  auto operator<=>(const OptimizerId&) const = default;
};

// What became of a checkpoint.
struct CheckpointReport {
  absl::Status status;
  std::string directory;  // where it is, or was to be
  uint64_t committed_steps = 0;
  uint64_t bytes = 0;
  absl::Duration duration;  // from the moment it is of
  bool run_whole = false;   // of a rank of a run: all ranks have written theirs, and the run's checkpoint has its name
  bool sealed = false;      // by this rank
};

// OnPass and OnStep are called by worker threads under an engine's lock: they must not block and not call back.
class OptimizerObserver {
 public:
  virtual ~OptimizerObserver() = default;
  virtual void OnPass(const OptimizerId& id, const engine::PassReport& report) = 0;
  virtual void OnStep(const OptimizerId& id, const engine::StepReport& report) = 0;
  virtual void OnCheckpoint(const OptimizerId& id, const CheckpointReport& report) = 0;

  // The table is about to host the optimizer; see HostedOptimizer::unique_id.
  virtual void OnHost(const OptimizerId& /*id*/, const std::string& /*unique_id*/,
                      const engine::RunMember& /*member*/) {}

  // The table does not know the optimizer any more.
  virtual void OnDelete(const OptimizerId& id) = 0;
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_OPTIMIZER_OBSERVER_H_
