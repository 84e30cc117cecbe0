// The machine of a PlanRequest: one that is known by name, or a description, and how each of its numbers is known.
#ifndef SUPEROFFLOAD_SERVER_PLAN_MACHINE_DESCRIPTION_H_
#define SUPEROFFLOAD_SERVER_PLAN_MACHINE_DESCRIPTION_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/simulator/machine.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

struct DescribedMachine {
  simulator::Machine machine;
  std::string known;  // whose numbers it has where it has none of its own; empty: none's
};

// INVALID_ARGUMENT: a field. NOT_FOUND: the name.
absl::StatusOr<DescribedMachine> ToMachine(const v1::PlanRequest& request);

// A sentence per number of the machine: its value, and whether it is given, measured, published or assumed. `network`:
// also what connects ranks.
std::vector<std::string> MachineSentences(const simulator::Machine& machine, const std::string& known, bool network);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_MACHINE_DESCRIPTION_H_
