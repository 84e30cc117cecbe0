#include "client/ctl/json.h"

#include <google/protobuf/util/json_util.h>

#include "absl/strings/ascii.h"

namespace superoffload::ctl {
namespace {

google::protobuf::util::JsonPrintOptions JsonOptions() {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  return options;
}

std::string Json(const google::protobuf::Message& message, const google::protobuf::util::JsonPrintOptions& options) {
  std::string text;
  (void)google::protobuf::util::MessageToJsonString(message, &text, options);  // fails for Any only
  return std::string(absl::StripTrailingAsciiWhitespace(text)) + "\n";
}

}  // namespace

std::string JsonText(const google::protobuf::Message& message) {
  auto options = JsonOptions();
  options.add_whitespace = true;
  return Json(message, options);
}

std::string JsonLine(const google::protobuf::Message& message) { return Json(message, JsonOptions()); }

}  // namespace superoffload::ctl
