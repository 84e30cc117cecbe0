#include "server/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little);

absl::Status Bad(const std::string& what) { return absl::DataLossError("not a safetensors file: " + what); }

std::optional<std::vector<uint64_t>> Unsigneds(const Json& json) {
  if (!json.is_array()) return std::nullopt;
  std::vector<uint64_t> values;
  for (const Json& value : json) {
    if (!value.is_number_unsigned()) return std::nullopt;
    values.push_back(value.get<uint64_t>());
  }
  return values;
}

absl::StatusOr<SafetensorsTensor> ParseTensor(const std::string& name, const Json& json) {
  const std::string quoted = absl::StrCat("tensor \"", name, "\" ");
  if (!json.is_object() || !json.contains("dtype") || !json.contains("shape") || !json.contains("data_offsets")) {
    return Bad(quoted + "lacks dtype, shape or data_offsets");
  }
  const std::optional<std::vector<uint64_t>> shape = Unsigneds(json["shape"]);
  const std::optional<std::vector<uint64_t>> offsets = Unsigneds(json["data_offsets"]);
  if (!shape || !offsets || offsets->size() != 2 || !json["dtype"].is_string()) {
    return Bad(quoted + "has an ill-formed dtype, shape or data_offsets");
  }
  SafetensorsTensor tensor{name, json["dtype"].get<std::string>(), *shape, (*offsets)[0], (*offsets)[1]};
  if (DTypeBytes(tensor.dtype) == 0) return Bad(quoted + "has an unknown dtype");
  const std::optional<uint64_t> bytes = TensorBytes(DTypeBytes(tensor.dtype), tensor.shape);
  if (!bytes || tensor.end < tensor.begin || tensor.end - tensor.begin != *bytes) {
    return Bad(quoted + "has offsets that do not fit its shape");
  }
  return tensor;
}

}  // namespace

uint64_t DTypeBytes(const std::string& dtype) {
  static const std::map<std::string, uint64_t> kBytes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E5M2", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2}, {"F8_E4M3", 1},
      {"I32", 4},  {"U32", 4}, {"BF16", 2}, {"F32", 4},     {"F64", 8}, {"I64", 8}, {"U64", 8}};
  const auto found = kBytes.find(dtype);
  return found == kBytes.end() ? 0 : found->second;
}

std::optional<uint64_t> TensorBytes(uint64_t element_bytes, const std::vector<uint64_t>& shape) {
  uint64_t bytes = element_bytes;
  for (const uint64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string EncodeSafetensorsHeader(const SafetensorsHeader& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[kSafetensorsMetadata] = header.metadata;
  for (const SafetensorsTensor& tensor : header.tensors) {
    json[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}};
  }
  // Names are checked to be UTF-8 on creation of the optimizer by protobuf.
  std::string text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string encoded(reinterpret_cast<const char*>(&length), sizeof(length));
  return encoded + text;
}

absl::StatusOr<uint64_t> ParseSafetensorsLength(std::string_view first_bytes, uint64_t file_bytes) {
  uint64_t length;
  if (first_bytes.size() < sizeof(length)) return Bad("it is shorter than its length field");
  std::memcpy(&length, first_bytes.data(), sizeof(length));
  if (length > kMaxSafetensorsHeaderBytes || length > file_bytes - sizeof(length)) {
    return Bad(absl::StrCat("its header would have ", length, " bytes"));
  }
  return length;
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, uint64_t data_bytes) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return Bad("its header is no JSON object");
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name == kSafetensorsMetadata) {
      if (!value.is_object()) return Bad("its metadata is no JSON object");
      for (const auto& [key, word] : value.items()) {
        if (!word.is_string()) return Bad(absl::StrCat("its metadata \"", key, "\" is no string"));
        header.metadata[key] = word.get<std::string>();
      }
      continue;
    }
    absl::StatusOr<SafetensorsTensor> tensor = ParseTensor(name, value);
    if (!tensor.ok()) return tensor.status();
    header.tensors.push_back(*std::move(tensor));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.begin != end) return Bad(absl::StrCat("there is a hole or an overlap before \"", tensor.name, "\""));
    end = tensor.end;
  }
  if (end != data_bytes) return Bad(absl::StrCat("it has ", data_bytes, " bytes of data but describes ", end));
  return header;
}

}  // namespace superoffload::checkpoint
