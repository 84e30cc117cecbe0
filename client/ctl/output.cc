#include "client/ctl/output.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "superoffload/v1/printable.h"

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

std::string Table(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Printable(row[i]).size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppendFormat(&line, "%-*s  ", static_cast<int>(widths[i]), Printable(row[i]));
    }
    absl::StrAppend(&text, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  return text;
}

std::string Word(const std::string& enum_name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(enum_name, prefix));
}

std::string BytesText(uint64_t bytes) {
  static constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, value, kUnits[unit]);
}

std::string TimeText(const google::protobuf::Timestamp& time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixSeconds(time.seconds()), absl::UTCTimeZone());
}

std::string JsonText(const google::protobuf::Message& message) {
  auto options = JsonOptions();
  options.add_whitespace = true;
  return Json(message, options);
}

std::string JsonLine(const google::protobuf::Message& message) { return Json(message, JsonOptions()); }

std::string JsonOf(const google::protobuf::Message& value) { return Json(value, {}); }

void Print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

int ExitStatus(const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "superoffloadctl: %s: %s\n", absl::StatusCodeToString(status.code()).c_str(),
               Printable(std::string(status.message())).c_str());
  return 1;
}

}  // namespace superoffload::ctl
