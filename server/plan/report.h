// A PlanResponse as text for people.
#ifndef SUPEROFFLOAD_SERVER_PLAN_REPORT_H_
#define SUPEROFFLOAD_SERVER_PLAN_REPORT_H_

#include <string>

#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

// Ends with a newline. Of several ranks, that with the most memory. The assumptions come last, if at all.
std::string Report(const v1::PlanResponse& response, bool assumptions);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_REPORT_H_
