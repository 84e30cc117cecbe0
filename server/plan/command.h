// superoffloadd --plan.
#ifndef SUPEROFFLOAD_SERVER_PLAN_COMMAND_H_
#define SUPEROFFLOAD_SERVER_PLAN_COMMAND_H_

namespace superoffload::plan {

// Reads a PlanRequest from `input`, writes a PlanResponse to `output`, and returns the exit status. With a sentence on
// standard error: 2 when the request is wrong, 3 when it asks for the timeline of a step that does not fit.
int RunPlan(int input, int output);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_COMMAND_H_
