// protobuf's JSON mapping with the field names of the .proto files and with defaults.
#ifndef SUPEROFFLOAD_CLIENT_CTL_JSON_H_
#define SUPEROFFLOAD_CLIENT_CTL_JSON_H_

#include <google/protobuf/message.h>

#include <string>

namespace superoffload::ctl {

// Indented.
std::string JsonText(const google::protobuf::Message& message);

// In one line.
std::string JsonLine(const google::protobuf::Message& message);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_JSON_H_
