// The model of a PlanRequest: one that is known by name, an architecture, or a list of parameters with one.
#ifndef SUPEROFFLOAD_SERVER_PLAN_MODEL_DESCRIPTION_H_
#define SUPEROFFLOAD_SERVER_PLAN_MODEL_DESCRIPTION_H_

#include "absl/status/statusor.h"
#include "server/engine/spec.h"
#include "server/simulator/architecture.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

struct DescribedModel {
  simulator::Model model;
  engine::OptimizerSpec spec;  // of its parameters
};

// INVALID_ARGUMENT: a field. NOT_FOUND: the name.
absl::StatusOr<DescribedModel> ToModel(const v1::PlanRequest& request);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_MODEL_DESCRIPTION_H_
