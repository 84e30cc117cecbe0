// The header of a safetensors file (https://github.com/huggingface/safetensors):
//
//   uint64 little-endian: bytes of the JSON that follows | JSON, padded with spaces | data
//
// The JSON maps each tensor's name to its dtype, shape and offsets within the data, and "__metadata__" to strings.
// Tensors lie one after the other without holes.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_SAFETENSORS_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace superoffload::checkpoint {

inline constexpr size_t kSafetensorsLengthBytes = 8;
inline constexpr char kSafetensorsMetadata[] = "__metadata__";  // where a tensor's name would stand
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // "F32", "BF16", ...
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // bytes into the data
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of the data
  std::map<std::string, std::string> metadata;
};

// Of an element of a dtype of the format; 0 for others.
uint64_t DTypeBytes(const std::string& dtype);

// Of a tensor; none when they do not fit 64 bits.
std::optional<uint64_t> TensorBytes(uint64_t element_bytes, const std::vector<uint64_t>& shape);

// The length and the JSON, together a multiple of 8 bytes, so that fp32 data is aligned.
std::string EncodeSafetensorsHeader(const SafetensorsHeader& header);

// The length of the JSON from the file's first 8 bytes. DATA_LOSS when a file of `file_bytes` cannot have it.
absl::StatusOr<uint64_t> ParseSafetensorsLength(std::string_view first_bytes, uint64_t file_bytes);

// `data_bytes` is what follows the JSON in the file. DATA_LOSS: not a header of the format, or not of so much data.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, uint64_t data_bytes);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_SAFETENSORS_H_
