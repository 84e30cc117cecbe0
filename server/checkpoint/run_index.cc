#include "server/checkpoint/run_index.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "superoffload run";
constexpr uint64_t kVersion = 1;

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(kRunIndexFile, " is not the index of a run: ", what));
}

// An unsigned number of `json`; 0 when there is none.
uint64_t Unsigned(const Json& json, const char* name) {
  return json.contains(name) && json[name].is_number_unsigned() ? json[name].get<uint64_t>() : 0;
}

std::string Text(const Json& json, const char* name) {
  return json.contains(name) && json[name].is_string() ? json[name].get<std::string>() : "";
}

}  // namespace

std::string PartName(uint32_t rank, uint32_t ranks) { return absl::StrFormat("rank-%05d-of-%05d", rank, ranks); }

std::string EncodeRunIndex(const RunIndex& index) {
  Json parts = Json::array();
  for (size_t rank = 0; rank < index.index_crc32.size(); ++rank) {
    parts.push_back({{"directory", PartName(static_cast<uint32_t>(rank), index.moment.ranks)},
                     {"index_crc32", index.index_crc32[rank]}});
  }
  const Json json = {{"metadata",
                      {{"format", kFormat},
                       {"version", kVersion},
                       {"run_name", index.moment.run_name},
                       {"lineage", index.moment.lineage},
                       {"committed_steps", index.moment.committed_steps},
                       {"algorithm", index.algorithm},
                       {"run", index.run},
                       {"sequence", index.sequence},
                       {"total_size", index.total_bytes}}},
                     {"parts", parts}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::StatusOr<RunIndex> ParseRunIndex(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("it is no JSON object");
  if (!json.contains("metadata") || !json["metadata"].is_object()) return Bad("\"metadata\" is missing");
  if (!json.contains("parts") || !json["parts"].is_array() || json["parts"].empty()) return Bad("\"parts\" is missing");
  const Json& metadata = json["metadata"];
  if (Text(metadata, "format") != kFormat) return Bad("its format is another one");
  if (const uint64_t version = Unsigned(metadata, "version"); version != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the run's index is of format version ", version,
                                                      ", this daemon knows version ", kVersion,
                                                      "; restore it with a daemon of that version"));
  }
  RunIndex index;
  index.moment = {Text(metadata, "run_name"), static_cast<uint32_t>(json["parts"].size()),
                  Unsigned(metadata, "lineage"), Unsigned(metadata, "committed_steps")};
  index.algorithm = Text(metadata, "algorithm");
  index.run = Unsigned(metadata, "run");
  index.sequence = Unsigned(metadata, "sequence");
  index.total_bytes = Unsigned(metadata, "total_size");
  for (const Json& part : json["parts"]) {
    const uint32_t rank = static_cast<uint32_t>(index.index_crc32.size());
    if (!part.is_object() || Text(part, "directory") != PartName(rank, index.moment.ranks)) {
      return Bad(absl::StrCat("the part of rank ", rank, " is not ", PartName(rank, index.moment.ranks)));
    }
    if (!part.contains("index_crc32") || !part["index_crc32"].is_number_unsigned() ||
        part["index_crc32"].get<uint64_t>() > 0xffffffff) {
      return Bad(absl::StrCat("the CRC-32 of rank ", rank, " is no 32-bit number"));
    }
    index.index_crc32.push_back(part["index_crc32"].get<uint32_t>());
  }
  return index;
}

}  // namespace superoffload::checkpoint
