// What a schedule has written in its directory: names, sequences, and removal of what is older than the newest ones.
// Age is the order of writing within a run, not the number of steps: training may go back.
//
// An optimizer that trains alone takes a name that is free: step-00001000, or step-00001000-2. Ranks of a run do not
// talk to each other, so theirs follows from the step and the lineage alone: step-00001000-00c0ffee00c0ffee. The rank
// that seals a checkpoint removes older ones.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULED_CHECKPOINTS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULED_CHECKPOINTS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "server/checkpoint/read_scope.h"
#include "server/optimizer/hosted_optimizer.h"

namespace superoffload::checkpoint {

// The path of a checkpoint in `directory` that nothing there has.
std::string NewScheduled(const std::string& directory, uint64_t committed_steps);

// The sequence of the optimizer's next checkpoint in `directory`.
uint64_t NextSequence(const std::string& directory, const optimizer::HostedOptimizer& optimizer);

// Removes the optimizer's checkpoints in `directory` but for the newest `keep`; all stay where that is 0.
void PruneScheduled(const std::string& directory, const optimizer::HostedOptimizer& optimizer, size_t keep);

// The path of a run's checkpoint in `directory`, the same for all ranks.
std::string ScheduledRun(const std::string& directory, uint64_t committed_steps, uint64_t lineage);

// The sequence of the run's next checkpoint in `directory`.
uint64_t NextRunSequence(const std::string& directory, const std::string& run_name, const ReadScope& scope = {});

// Right after `sealed` has got its name: removes the run's checkpoints but for the newest `keep`, and what ranks have
// left of those that nobody sealed. Every rank has ended those, since each takes part in all, one after the other.
void PruneRuns(const std::string& sealed, size_t keep, const ReadScope& scope = {});

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SCHEDULED_CHECKPOINTS_H_
