// The command line of `superoffloadctl plan`. Its flags are the scalar fields of PlanRequest, by their names: what
// plan.proto learns, the command line knows.
#ifndef SUPEROFFLOAD_CLIENT_CTL_PLAN_ARGUMENTS_H_
#define SUPEROFFLOAD_CLIENT_CTL_PLAN_ARGUMENTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::ctl {

struct PlanArguments {
  v1::PlanRequest request;
  std::string model_config;  // what --model names; empty: something else than a configuration, or nothing
  std::string timeline;      // the file; its ending says in which format
  bool json = false;
  bool help = false;
};

// `--flag=value` or `--flag value`; `-` and `_` are the same in a flag's name; a bool needs no value. INVALID_ARGUMENT:
// a sentence about the first word or file that is wrong.
absl::StatusOr<PlanArguments> ParsePlanArguments(const std::vector<std::string>& words);

// One line each, with what it takes.
std::string PlanFlags();

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_PLAN_ARGUMENTS_H_
