// What transformers' causal language models are made of, family by family: their parameters, in the order of
// named_parameters(), and their numbers as the planner has them.
#ifndef SUPEROFFLOAD_CLIENT_CTL_MODEL_FAMILIES_H_
#define SUPEROFFLOAD_CLIENT_CTL_MODEL_FAMILIES_H_

#include <string>
#include <vector>

#include "client/ctl/config_fields.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::ctl {

// As model_type of a config.json has them.
std::vector<std::string> FamilyNames();

// Sets architecture and parameters, which have `dtype` but for those that transformers keeps in fp32. False: the family
// is not known. Where a field is wrong, config.status() says so and the description is worth nothing.
bool DescribeFamily(const std::string& family, ConfigFields& config, v1::DataType dtype, v1::ModelDescription* model);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_MODEL_FAMILIES_H_
