// Tables of words, and the words for what stands in their cells.
#ifndef SUPEROFFLOAD_CLIENT_CTL_TABLE_H_
#define SUPEROFFLOAD_CLIENT_CTL_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

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

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_TABLE_H_
