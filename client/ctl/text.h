// What superoffloadctl prints, as text for people and as JSON for programs. Every text ends with a newline unless said.
#ifndef SUPEROFFLOAD_CLIENT_CTL_TEXT_H_
#define SUPEROFFLOAD_CLIENT_CTL_TEXT_H_

#include <cstdint>
#include <string>

#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

std::string InfoText(const v1::ServerInfo& info);
std::string ListText(const v1::ListOptimizersResponse& response);
std::string DescriptionText(const v1::Optimizer& optimizer);
std::string SettledText(const v1::Optimizer& optimizer);

std::string TopologyText(const v1::Topology& topology);
std::string RestoredText(const v1::Optimizer& optimizer);
std::string CheckpointText(const v1::CheckpointProgress& progress);

// Without a newline, to be written over.
std::string ProgressText(const v1::CheckpointProgress& progress);

// The columns of StepText.
std::string StepHeading();
std::string StepText(const v1::StepReport& report);

// protobuf's JSON mapping with the field names of the .proto files and with defaults, indented, or in one line.
std::string JsonText(const google::protobuf::Message& message);
std::string JsonLine(const google::protobuf::Message& message);

// "1.5 GiB".
std::string BytesText(uint64_t bytes);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_TEXT_H_
