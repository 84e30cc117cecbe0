// Answers a PlanRequest.
#ifndef SUPEROFFLOAD_SERVER_PLAN_ANSWER_H_
#define SUPEROFFLOAD_SERVER_PLAN_ANSWER_H_

#include "absl/status/statusor.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

// INVALID_ARGUMENT, NOT_FOUND: a sentence that names what is wrong with the request. RESOURCE_EXHAUSTED: it asks for
// the timeline of a step that does not fit.
absl::StatusOr<v1::PlanResponse> Answer(const v1::PlanRequest& request);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_ANSWER_H_
