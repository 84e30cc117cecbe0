// What can be had of an optimizer whose memory no daemon can host: one that can be read and written to a checkpoint.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_SALVAGE_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_SALVAGE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/spec.h"
#include "server/engine/worker_pool.h"
#include "server/memory/memory_budget.h"
#include "server/optimizer/hosted_optimizer.h"

namespace superoffload::optimizer {

struct Salvaged {
  std::unique_ptr<memory::MemoryBudget> budget;  // outside of the daemon's: it adds no memory
  std::unique_ptr<HostedOptimizer> optimizer;
  std::string doubts;  // what is not guaranteed, in sentences; empty when the optimizer is whole
};

// `memory` is that of an optimizer of this spec; masters and moments stay as they are, unless the record is whole: then
// they are brought to the last committed step, as a daemon that hosts it would do. FAILED_PRECONDITION: the record is
// of a format that this daemon does not read. DATA_LOSS: a part is smaller than the spec needs.
absl::StatusOr<Salvaged> Salvage(OptimizerId id, engine::OptimizerSpec spec, HostedMemory memory,
                                 engine::WorkerPool* pool);

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_SALVAGE_H_
