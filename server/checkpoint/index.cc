#include "server/checkpoint/index.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "superoffload";
constexpr uint64_t kVersion = 2, kOldestVersion = 1;

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(kIndexFile, " is not the index of a checkpoint: ", what));
}

// What is no number is left out, and comes out as the value that the optimizer was created with.
NamedScalars ParseGroup(const Json& json) {
  NamedScalars scalars;
  if (!json.is_object()) return scalars;
  for (const auto& [name, value] : json.items()) {
    if (value.is_number()) scalars[name] = value.get<double>();
  }
  return scalars;
}

absl::StatusOr<std::vector<uint64_t>> ParseExtents(const Json& json, const char* name) {
  std::vector<uint64_t> extents;
  if (!json.is_object() || !json.contains(name) || !json[name].is_array()) {
    return Bad(absl::StrCat("\"", name, "\" of a shard is missing"));
  }
  for (const Json& extent : json[name]) {
    if (!extent.is_number_unsigned()) return Bad(absl::StrCat("\"", name, "\" of a shard has what is no extent"));
    extents.push_back(extent.get<uint64_t>());
  }
  return extents;
}

// An optional object of the index: {} when there is none.
const Json& ObjectOf(const Json& json, const char* name) {
  static const Json* const none = new Json(Json::object());
  return json.contains(name) && json[name].is_object() ? json[name] : *none;
}

// An unsigned number of `json`; 0 when there is none.
uint64_t Unsigned(const Json& json, const char* name) {
  return json.contains(name) && json[name].is_number_unsigned() ? json[name].get<uint64_t>() : 0;
}

bool IsFileName(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name.find('\0') == std::string::npos && name != "." &&
         name != "..";
}

}  // namespace

std::string EncodeIndex(const Index& index) {
  Json shards = Json::object();
  for (const auto& [name, place] : index.shards) {
    shards[name] = {{"global_shape", place.global_shape}, {"global_offset", place.global_offset}};
  }
  const Json json = {{"metadata",
                      {{"format", kFormat},
                       {"version", kVersion},
                       {"optimizer", index.optimizer},
                       {"algorithm", index.algorithm},
                       {"run_name", index.run_name},
                       {"rank", index.rank},
                       {"ranks", index.ranks},
                       {"lineage", index.lineage},
                       {"run", index.run},
                       {"sequence", index.sequence},
                       {"step", index.step},
                       {"committed_steps", index.committed_steps},
                       {"total_size", index.total_bytes}}},
                     {"groups", index.groups},
                     {"parameter_groups", index.parameter_groups},
                     {"parameter_steps", index.parameter_steps},
                     {"shards", shards},
                     {"crc32", index.file_crc32},
                     {"weight_map", index.tensor_files}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string HyperparametersText(const std::vector<NamedScalars>& groups) { return Json(groups).dump(); }

absl::StatusOr<Index> ParseIndex(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("it is no JSON object");
  for (const char* part : {"metadata", "parameter_groups", "crc32", "weight_map"}) {
    if (!json.contains(part) || !json[part].is_object()) return Bad(absl::StrCat("\"", part, "\" is missing"));
  }
  if (!json.contains("groups") || !json["groups"].is_array()) return Bad("\"groups\" is missing");
  const Json& metadata = json["metadata"];
  if (!metadata.contains("format") || metadata["format"] != kFormat) return Bad("its format is another one");
  if (const uint64_t version = Unsigned(metadata, "version"); version < kOldestVersion || version > kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the checkpoint is of format version ", version,
                                                      ", this daemon knows versions ", kOldestVersion, " to ", kVersion,
                                                      "; restore it with a daemon of that version"));
  }
  Index index;
  if (metadata.contains("optimizer") && metadata["optimizer"].is_string()) index.optimizer = metadata["optimizer"];
  if (metadata.contains("algorithm") && metadata["algorithm"].is_string()) index.algorithm = metadata["algorithm"];
  if (metadata.contains("run_name") && metadata["run_name"].is_string()) index.run_name = metadata["run_name"];
  index.rank = static_cast<uint32_t>(Unsigned(metadata, "rank"));
  index.ranks = static_cast<uint32_t>(std::max<uint64_t>(Unsigned(metadata, "ranks"), 1));
  index.lineage = Unsigned(metadata, "lineage");
  index.run = Unsigned(metadata, "run");
  index.sequence = Unsigned(metadata, "sequence");
  index.step = Unsigned(metadata, "step");
  index.committed_steps = Unsigned(metadata, "committed_steps");
  index.total_bytes = Unsigned(metadata, "total_size");
  for (const Json& group : json["groups"]) index.groups.push_back(ParseGroup(group));
  for (const auto& [name, group] : json["parameter_groups"].items()) {
    if (!group.is_number_unsigned() || group.get<uint64_t>() >= index.groups.size()) {
      return Bad(absl::StrCat("the group of parameter \"", name, "\" does not exist"));
    }
    index.parameter_groups[name] = group.get<uint32_t>();
  }
  for (const auto& [name, steps] : ObjectOf(json, "parameter_steps").items()) {
    if (!steps.is_number_unsigned() || steps.get<uint64_t>() > index.committed_steps) {
      return Bad(absl::StrCat("the steps of parameter \"", name, "\" are no number up to those of the optimizer"));
    }
    index.parameter_steps[name] = steps.get<uint64_t>();
  }
  for (const auto& [name, place] : ObjectOf(json, "shards").items()) {
    absl::StatusOr<std::vector<uint64_t>> shape = ParseExtents(place, "global_shape");
    if (!shape.ok()) return shape.status();
    absl::StatusOr<std::vector<uint64_t>> offset = ParseExtents(place, "global_offset");
    if (!offset.ok()) return offset.status();
    index.shards[name] = {*std::move(shape), *std::move(offset)};
  }
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string() || !IsFileName(file.get<std::string>())) {
      return Bad(absl::StrCat("the file of tensor \"", tensor, "\" is no file name"));
    }
    index.tensor_files[tensor] = file.get<std::string>();
  }
  for (const auto& [file, crc32] : json["crc32"].items()) {
    if (!crc32.is_number_unsigned() || crc32.get<uint64_t>() > 0xffffffff) {
      return Bad(absl::StrCat("the CRC-32 of ", file, " is no 32-bit number"));
    }
    index.file_crc32[file] = crc32.get<uint32_t>();
  }
  return index;
}

}  // namespace superoffload::checkpoint
