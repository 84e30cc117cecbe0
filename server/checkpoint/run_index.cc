#include "server/checkpoint/run_index.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/checkpoint/json_fields.h"
#include "server/checkpoint/summed_json.h"
#include "server/engine/spec.h"

namespace superoffload::checkpoint {
namespace {

using Json = nlohmann::json;                 // finds a name among many
using OrderedJson = nlohmann::ordered_json;  // writes them in the order that people read

constexpr char kFormat[] = "superoffload run";
constexpr uint64_t kVersion = 2, kOldestVersion = 1;
constexpr uint64_t kFirstSummedVersion = 2;

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(kRunIndexFile, " is not the index of a run: ", what));
}

}  // namespace

std::string PartName(uint32_t rank, uint32_t ranks) { return absl::StrFormat("rank-%05d-of-%05d", rank, ranks); }

std::string EncodeRunIndex(const RunIndex& index) {
  OrderedJson parts = OrderedJson::array();
  for (size_t rank = 0; rank < index.index_crc32.size(); ++rank) {
    parts.push_back({{"directory", PartName(static_cast<uint32_t>(rank), index.moment.ranks)},
                     {"index_crc32", index.index_crc32[rank]}});
  }
  const OrderedJson json = {{"metadata",
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
  return SumUp(json.dump(1, ' ', false, OrderedJson::error_handler_t::replace));
}

absl::StatusOr<RunIndex> ParseRunIndex(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("it is no JSON object");
  if (!json.contains("metadata") || !json["metadata"].is_object()) return Bad("\"metadata\" is missing");
  if (!json.contains("parts") || !json["parts"].is_array() || json["parts"].empty()) return Bad("\"parts\" is missing");
  const Json& metadata = json["metadata"];
  if (!metadata.contains("format") || metadata["format"] != kFormat) return Bad("its format is another one");
  JsonFields fields(metadata);
  const uint64_t version = fields.Unsigned("version", 0);
  if (version < kOldestVersion || version > kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the run's index is of format version ", version,
                                                      ", this daemon knows versions ", kOldestVersion, " to ", kVersion,
                                                      "; restore it with a daemon of that version"));
  }
  if ((version >= kFirstSummedVersion || json.contains(kSumKey)) && !IsSummedUp(text)) {
    return absl::DataLossError(absl::StrCat(kRunIndexFile,
                                            " is damaged or was changed: its CRC-32 is not the one at its ",
                                            "end; restore an earlier checkpoint"));
  }
  if (json["parts"].size() > std::numeric_limits<uint32_t>::max()) return Bad("\"parts\" has too many ranks");
  RunIndex index;
  index.moment = {fields.Text("run_name"), static_cast<uint32_t>(json["parts"].size()), fields.Unsigned("lineage", 0),
                  fields.Unsigned("committed_steps", std::nullopt, engine::kMaxSteps)};
  index.algorithm = fields.Text("algorithm");
  index.run = fields.Unsigned("run", 0);
  index.sequence = fields.Unsigned("sequence", 0, engine::kMaxSteps);
  index.total_bytes = fields.Unsigned("total_size", 0);
  if (!fields.wrong().empty()) return Bad(fields.wrong());
  for (const Json& part : json["parts"]) {
    const uint32_t rank = static_cast<uint32_t>(index.index_crc32.size());
    if (!part.is_object() || !part.contains("directory") || part["directory"] != PartName(rank, index.moment.ranks)) {
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
