// What commands print: tables of words, the words for what stands in their cells, JSON, and failures.
#ifndef SUPEROFFLOAD_CLIENT_CTL_OUTPUT_H_
#define SUPEROFFLOAD_CLIENT_CTL_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::ctl {

using Row = std::vector<std::string>;

// Columns as wide as their widest cell, two spaces apart.
std::string Table(const std::vector<Row>& rows);

// VERDICT_COMMIT -> commit
std::string Word(const std::string& enum_name, absl::string_view prefix);

// "1.5 GiB".
std::string BytesText(uint64_t bytes);

std::string TimeText(const google::protobuf::Timestamp& time);

// protobuf's JSON mapping with the field names of the .proto files and with defaults: indented, and in one line.
std::string JsonText(const google::protobuf::Message& message);
std::string JsonLine(const google::protobuf::Message& message);

// The JSON that `value` is, a google.protobuf.Struct or ListValue, in one line. JsonLine adds fields of theirs.
std::string JsonOf(const google::protobuf::Message& value);

// At once, on standard output.
void Print(const std::string& text);

// `answer` as JSON, or as `text(*answer)` tells it to people.
template <typename Message, typename Text>
absl::Status PrintAnswer(const absl::StatusOr<Message>& answer, bool json, const Text& text) {
  if (!answer.ok()) return answer.status();
  Print(json ? JsonText(*answer) : text(*answer));
  return absl::OkStatus();
}

// 0, or 1 once standard error has the failure.
int ExitStatus(const absl::Status& status);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_OUTPUT_H_
