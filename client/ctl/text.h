// What superoffloadctl prints of a daemon, its machine, checkpoints and steps, as text for people. Every text ends with a
// newline unless said.
#ifndef SUPEROFFLOAD_CLIENT_CTL_TEXT_H_
#define SUPEROFFLOAD_CLIENT_CTL_TEXT_H_

#include <string>

#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

std::string InfoText(const v1::ServerInfo& info);
std::string TopologyText(const v1::Topology& topology);

std::string ExportText(const v1::ExportOptimizerResponse& response);
std::string CheckpointText(const v1::CheckpointProgress& progress);

// Without a newline, to be written over.
std::string ProgressText(const v1::CheckpointProgress& progress);

// The columns of StepText.
std::string StepHeading();
std::string StepText(const v1::StepReport& report);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_TEXT_H_
