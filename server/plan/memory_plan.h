// The memory of each rank: in the GPU, and on the host against the daemon's budget.
//
// The host's is exact: the layout, the record and the charge to the budget are the daemon's own functions. Ranks share
// the parameters as FSDP2 and ZeRO-3 do (simulator::ShardOf).
#ifndef SUPEROFFLOAD_SERVER_PLAN_MEMORY_PLAN_H_
#define SUPEROFFLOAD_SERVER_PLAN_MEMORY_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/layout.h"
#include "server/engine/spec.h"
#include "server/plan/question.h"
#include "server/simulator/fit.h"

namespace superoffload::plan {

// By purpose; the sum is what a rank with this share is charged in the daemon's budget: for its optimizer, and for what
// the daemon lends it.
std::vector<simulator::MemoryItem> HostMemory(const Question& question, const engine::OptimizerSpec& share,
                                              const engine::Layout& layout);

// The budget of a daemon that is not configured otherwise.
uint64_t HostBudgetBytes(const simulator::Machine& machine);

// Of a rank whose share has this layout.
std::vector<simulator::MemoryItem> GpuMemoryOf(const Question& question, const engine::Layout& layout);

// The same with less room for gradients and published parameters, from more to less; nothing where it may not save any.
std::vector<Question> WithLessRoom(const Question& question);

struct RankMemory {
  std::vector<simulator::MemoryItem> gpu;
  std::vector<simulator::MemoryItem> host;
};

struct MemoryPlan {
  std::vector<RankMemory> ranks;
  uint32_t gradient_slots = 2;
  bool in_place = false;
  bool gpu_fits = true;  // on every rank
  bool host_fits = true;
};

// With less room for gradients and published parameters where the question may save it, and the host's memory has none.
// INVALID_ARGUMENT: the layout cannot be planned.
absl::StatusOr<MemoryPlan> PlanMemory(const Question& question);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_MEMORY_PLAN_H_
