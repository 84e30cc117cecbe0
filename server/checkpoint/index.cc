#include "server/checkpoint/index.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/algorithm.h"
#include "server/checkpoint/json_fields.h"
#include "server/checkpoint/safetensors.h"
#include "server/checkpoint/summed_json.h"
#include "server/engine/spec.h"

namespace superoffload::checkpoint {
namespace {

using Json = nlohmann::json;                 // finds a name among many
using OrderedJson = nlohmann::ordered_json;  // writes them in the order that people read

constexpr char kFormat[] = "superoffload";
constexpr uint64_t kVersion = 3, kOldestVersion = 1;
constexpr uint64_t kFirstSummedVersion = 3;
constexpr uint64_t kMaxStep = uint64_t{1} << 48;  // skipped ones count, too
constexpr uint64_t kMaxTotalBytes = uint64_t{1} << 60;
constexpr char kAlgorithmOfGroup[] = "algorithm";  // stands among the scalars in version 1

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(kIndexFile, " is not the index of a checkpoint: ", what));
}

// Scalars that `algorithm` has are in their ranges; null: it is not known, and they are finite.
absl::StatusOr<NamedScalars> ParseGroup(const Json& json, const kernels::Algorithm* algorithm) {
  NamedScalars scalars;
  if (!json.is_object()) return Bad("a group of \"groups\" is no JSON object");
  for (const auto& [name, value] : json.items()) {
    if (name == kAlgorithmOfGroup) continue;
    if (!value.is_number()) return Bad(absl::StrCat("hyper-parameter \"", name, "\" is no number"));
    scalars[name] = value.get<double>();
    if (!std::isfinite(scalars[name])) return Bad(absl::StrCat("hyper-parameter \"", name, "\" is not finite"));
    for (const kernels::Scalar& scalar : algorithm ? algorithm->scalars : std::span<const kernels::Scalar>()) {
      if (scalar.name != name) continue;
      if (absl::Status status = engine::ValidateScalar(scalar, scalars[name]); !status.ok()) {
        return Bad(status.message());
      }
    }
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

absl::StatusOr<ShardPlace> ParsePlace(const std::string& parameter, const Json& json) {
  absl::StatusOr<std::vector<uint64_t>> shape = ParseExtents(json, "global_shape");
  if (!shape.ok()) return shape.status();
  absl::StatusOr<std::vector<uint64_t>> offset = ParseExtents(json, "global_offset");
  if (!offset.ok()) return offset.status();
  bool lies = offset->size() == shape->size() && TensorBytes(sizeof(double), *shape).has_value();
  for (size_t i = 0; lies && i < shape->size(); ++i) lies = (*offset)[i] <= (*shape)[i];
  if (!lies) return Bad(absl::StrCat("the shard of parameter \"", parameter, "\" does not lie in a tensor"));
  return ShardPlace{*std::move(shape), *std::move(offset)};
}

constexpr uint64_t kMaxBlockElements = kernels::kChunkElements;

absl::StatusOr<BlockedArray> ParseBlocked(const std::string& array, const Json& json) {
  if (!json.is_object() || !json.contains("scales") || !json["scales"].is_string()) {
    return Bad(absl::StrCat("the scales of array \"", array, "\" are missing"));
  }
  const uint64_t elements = JsonFields(json).Unsigned("elements", 0, kMaxBlockElements);
  if (elements < 2) return Bad(absl::StrCat("the blocks of array \"", array, "\" have no size"));
  return BlockedArray{.scales = json["scales"].get<std::string>(), .elements = static_cast<uint32_t>(elements)};
}

absl::Status ParseMetadata(const Json& json, Index& index) {
  JsonFields fields(json);
  index.optimizer = fields.Text("optimizer");
  index.algorithm = fields.Text("algorithm");
  index.run_name = fields.Text("run_name");
  index.ranks = static_cast<uint32_t>(fields.Unsigned("ranks", 1, std::numeric_limits<uint32_t>::max(), 1));
  index.rank = static_cast<uint32_t>(fields.Unsigned("rank", 0, index.ranks - 1));
  index.lineage = fields.Unsigned("lineage", 0);
  index.run = fields.Unsigned("run", 0);
  index.sequence = fields.Unsigned("sequence", 0, engine::kMaxSteps);
  index.committed_steps = fields.Unsigned("committed_steps", std::nullopt, engine::kMaxSteps);
  index.step = fields.Unsigned("step", index.committed_steps, kMaxStep, index.committed_steps);
  index.total_bytes = fields.Unsigned("total_size", 0, kMaxTotalBytes);
  if (json.contains("seed")) index.seed = fields.Unsigned("seed", std::nullopt);
  return fields.wrong().empty() ? absl::OkStatus() : Bad(fields.wrong());
}

bool IsFileName(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name.find('\0') == std::string::npos && name != "." &&
         name != "..";
}

}  // namespace

std::string EncodeIndex(const Index& index) {
  OrderedJson shards = OrderedJson::object();
  for (const auto& [name, place] : index.shards) {
    shards[name] = {{"global_shape", place.global_shape}, {"global_offset", place.global_offset}};
  }
  OrderedJson blocks = OrderedJson::object();
  for (const auto& [name, blocked] : index.blocks) {
    blocks[name] = {{"scales", blocked.scales}, {"elements", blocked.elements}};
  }
  OrderedJson json = {{"metadata",
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
                      {"blocks", blocks},
                      {"crc32", index.file_crc32},
                      {"weight_map", index.tensor_files}};
  if (index.seed) json["metadata"]["seed"] = *index.seed;
  return SumUp(json.dump(1, ' ', false, OrderedJson::error_handler_t::replace));
}

BlockedArrays BlockedArraysOf(const kernels::Algorithm& algorithm) {
  BlockedArrays blocks;
  for (const kernels::StateArray& array : algorithm.arrays) {
    if (array.codec == nullptr) continue;
    blocks[std::string(array.name)] = {std::string(algorithm.arrays[array.codec->scales].name),
                                       algorithm.block_elements, array.codec};
  }
  return blocks;
}

uint64_t BytesOf(const Index& index) {
  constexpr uint64_t kEntry = 128;  // of a map: its node, a string and a number
  uint64_t bytes = sizeof(index);
  for (const NamedScalars& group : index.groups) bytes += sizeof(group) + kEntry * group.size();
  for (const auto& [name, group] : index.parameter_groups) bytes += kEntry + name.size();
  for (const auto& [name, steps] : index.parameter_steps) bytes += kEntry + name.size();
  for (const auto& [name, place] : index.shards) {
    bytes += kEntry + name.size() + sizeof(uint64_t) * (place.global_shape.size() + place.global_offset.size());
  }
  for (const auto& [tensor, file] : index.tensor_files) bytes += kEntry + tensor.size() + file.size();
  for (const auto& [file, crc32] : index.file_crc32) bytes += kEntry + file.size();
  return bytes;
}

std::string HyperparametersText(const std::vector<NamedScalars>& groups) { return Json(groups).dump(); }

absl::StatusOr<Index> ParseIndex(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("it is no JSON object");
  for (const char* part : {"metadata", "parameter_groups", "crc32", "weight_map"}) {
    if (!json.contains(part) || !json[part].is_object()) return Bad(absl::StrCat("\"", part, "\" is missing"));
  }
  if (!json.contains("groups") || !json["groups"].is_array()) return Bad("\"groups\" is missing");
  for (const char* part : {"parameter_steps", "shards", "blocks"}) {
    if (json.contains(part) && !json[part].is_object()) return Bad(absl::StrCat("\"", part, "\" is no JSON object"));
  }
  const Json& metadata = json["metadata"];
  if (!metadata.contains("format") || metadata["format"] != kFormat) return Bad("its format is another one");
  const uint64_t version = JsonFields(metadata).Unsigned("version", 0);
  if (version < kOldestVersion || version > kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the checkpoint is of format version ", version,
                                                      ", this daemon knows versions ", kOldestVersion, " to ", kVersion,
                                                      "; restore it with a daemon of that version"));
  }
  if ((version >= kFirstSummedVersion || json.contains(kSumKey)) && !IsSummedUp(text)) {
    return absl::DataLossError(absl::StrCat(kIndexFile,
                                            " is damaged or was changed: its CRC-32 is not the one at its end; ",
                                            "restore an earlier checkpoint"));
  }
  Index index;
  if (absl::Status status = ParseMetadata(metadata, index); !status.ok()) return status;
  if (json["groups"].size() > engine::kMaxGroups) {
    return Bad(absl::StrCat("it has ", json["groups"].size(), " groups; there are at most ", engine::kMaxGroups));
  }
  if (json["parameter_groups"].size() > engine::kMaxParameters) {
    return Bad(absl::StrCat("it has ", json["parameter_groups"].size(), " parameters; there are at most ",
                            engine::kMaxParameters));
  }
  const kernels::Algorithm* const algorithm = kernels::FindAlgorithm(index.algorithm);
  for (const Json& json_group : json["groups"]) {
    absl::StatusOr<NamedScalars> group = ParseGroup(json_group, algorithm);
    if (!group.ok()) return group.status();
    index.groups.push_back(*std::move(group));
  }
  for (const auto& [name, group] : json["parameter_groups"].items()) {
    if (!group.is_number_unsigned() || group.get<uint64_t>() >= index.groups.size()) {
      return Bad(absl::StrCat("the group of parameter \"", name, "\" does not exist"));
    }
    index.parameter_groups[name] = group.get<uint32_t>();
  }
  if (json.contains("parameter_steps")) {
    for (const auto& [name, steps] : json["parameter_steps"].items()) {
      if (!steps.is_number_unsigned() || steps.get<uint64_t>() > index.committed_steps) {
        return Bad(absl::StrCat("the steps of parameter \"", name, "\" are no number up to those of the optimizer"));
      }
      index.parameter_steps[name] = steps.get<uint64_t>();
    }
  }
  if (json.contains("shards")) {
    for (const auto& [name, json_place] : json["shards"].items()) {
      absl::StatusOr<ShardPlace> place = ParsePlace(name, json_place);
      if (!place.ok()) return place.status();
      index.shards[name] = *std::move(place);
    }
  }
  if (json.contains("blocks")) {
    const BlockedArrays known = algorithm == nullptr ? BlockedArrays() : BlockedArraysOf(*algorithm);
    for (const auto& [name, json_blocked] : json["blocks"].items()) {
      absl::StatusOr<BlockedArray> blocked = ParseBlocked(name, json_blocked);
      if (!blocked.ok()) return blocked.status();
      if (const auto found = known.find(name); found != known.end()) blocked->codec = found->second.codec;
      index.blocks[name] = *std::move(blocked);
    }
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
