// What superoffloadctl prints of optimizers, as text for people. Every text ends with a newline.
#ifndef SUPEROFFLOAD_CLIENT_CTL_OPTIMIZER_TEXT_H_
#define SUPEROFFLOAD_CLIENT_CTL_OPTIMIZER_TEXT_H_

#include <string>
#include <vector>

#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

std::string ListText(const v1::ListOptimizersResponse& response);

struct HostedAt {
  std::string endpoint;  // of the daemon
  v1::Optimizer optimizer;
};
std::string ListAllText(const std::vector<HostedAt>& all);

// With name, uid and memory only.
std::string KeptText(const v1::ListOptimizersResponse& response);

std::string DescriptionText(const v1::Optimizer& optimizer);
std::string SettledText(const v1::Optimizer& optimizer);
std::string RestoredText(const v1::Optimizer& optimizer);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_OPTIMIZER_TEXT_H_
