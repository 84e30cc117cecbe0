// How fast it would be: a step, simulated.
#ifndef SUPEROFFLOAD_SERVER_PLAN_PERFORMANCE_H_
#define SUPEROFFLOAD_SERVER_PLAN_PERFORMANCE_H_

#include "absl/status/status.h"
#include "server/engine/layout.h"
#include "server/plan/memory_plan.h"
#include "server/plan/question.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

// Sets `performance`, or `performance_unknown`, and what the timeline asks for. INVALID_ARGUMENT: what was
// measured is more than the GPU's peak allows.
absl::Status SetPerformance(const Question& question, const engine::Layout& layout, const MemoryPlan& memory,
                            v1::PlanResponse& response);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_PERFORMANCE_H_
