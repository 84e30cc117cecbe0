#include "server/checkpoint/index.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {
namespace {

using Json = nlohmann::ordered_json;
using kernels::AdamHyperparameters;
using kernels::WeightDecay;

constexpr char kFormat[] = "superoffload";
constexpr uint64_t kVersion = 1;

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(kIndexFile, " is not the index of a checkpoint: ", what));
}

Json GroupJson(const AdamHyperparameters& group) {
  return {{"algorithm", group.decay_form == WeightDecay::kL2 ? "adam" : "adamw"},
          {"lr", group.lr},
          {"beta1", group.beta1},
          {"beta2", group.beta2},
          {"eps", group.eps},
          {"weight_decay", group.weight_decay}};
}

Json GroupsJson(const std::vector<AdamHyperparameters>& groups) {
  Json json = Json::array();
  for (const AdamHyperparameters& group : groups) json.push_back(GroupJson(group));
  return json;
}

// What is missing or of another type comes out as the default and is found by the caller's checks of ranges.
AdamHyperparameters ParseGroup(const Json& json) {
  AdamHyperparameters group;
  const auto number = [&](const char* name, double& value) {
    if (json.is_object() && json.contains(name) && json[name].is_number()) value = json[name].get<double>();
  };
  number("lr", group.lr);
  number("beta1", group.beta1);
  number("beta2", group.beta2);
  number("eps", group.eps);
  number("weight_decay", group.weight_decay);
  if (json.is_object() && json.contains("algorithm") && json["algorithm"] == "adam")
    group.decay_form = WeightDecay::kL2;
  return group;
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
  const Json json = {{"metadata",
                      {{"format", kFormat},
                       {"version", kVersion},
                       {"optimizer", index.optimizer},
                       {"run", index.run},
                       {"sequence", index.sequence},
                       {"step", index.step},
                       {"committed_steps", index.committed_steps},
                       {"total_size", index.total_bytes}}},
                     {"groups", GroupsJson(index.groups)},
                     {"parameter_groups", index.parameter_groups},
                     {"crc32", index.file_crc32},
                     {"weight_map", index.tensor_files}};
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string HyperparametersText(const std::vector<AdamHyperparameters>& groups) { return GroupsJson(groups).dump(); }

absl::StatusOr<Index> ParseIndex(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("it is no JSON object");
  for (const char* part : {"metadata", "parameter_groups", "crc32", "weight_map"}) {
    if (!json.contains(part) || !json[part].is_object()) return Bad(absl::StrCat("\"", part, "\" is missing"));
  }
  if (!json.contains("groups") || !json["groups"].is_array()) return Bad("\"groups\" is missing");
  const Json& metadata = json["metadata"];
  if (!metadata.contains("format") || metadata["format"] != kFormat) return Bad("its format is another one");
  if (const uint64_t version = Unsigned(metadata, "version"); version != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the checkpoint is of format version ", version,
                                                      ", this daemon knows version ", kVersion,
                                                      "; restore it with a daemon of that version"));
  }
  Index index;
  if (metadata.contains("optimizer") && metadata["optimizer"].is_string()) index.optimizer = metadata["optimizer"];
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
