// What to set so that a model trains on a machine, from the memory plan.
#ifndef SUPEROFFLOAD_SERVER_PLAN_RECOMMENDATION_H_
#define SUPEROFFLOAD_SERVER_PLAN_RECOMMENDATION_H_

#include "absl/status/statusor.h"
#include "server/plan/memory_plan.h"
#include "server/plan/question.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

absl::StatusOr<v1::Recommendation> Recommend(const Question& question, const MemoryPlan& memory);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_RECOMMENDATION_H_
