// superoffloadd --plan.
#ifndef SUPEROFFLOAD_SERVER_PLAN_COMMAND_H_
#define SUPEROFFLOAD_SERVER_PLAN_COMMAND_H_

namespace superoffload::plan {

// Reads a PlanRequest from `input`, writes a PlanResponse to `output`, and returns the exit status: 2, with a sentence
// on standard error, when the request is wrong.
int RunPlan(int input, int output);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_COMMAND_H_
