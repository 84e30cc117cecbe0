// Headers of safetensors files: what is accepted describes its data without holes.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "server/checkpoint/safetensors.h"

using namespace superoffload::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<uint64_t> length = ParseSafetensorsLength(bytes, size);
  if (!length.ok()) return 0;
  const uint64_t data_bytes = size - kSafetensorsLengthBytes - *length;
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(bytes.substr(kSafetensorsLengthBytes, *length), data_bytes);
  if (!header.ok()) return 0;
  uint64_t end = 0;
  for (const SafetensorsTensor& tensor : header->tensors) {
    if (tensor.begin != end || tensor.end < tensor.begin) std::abort();
    end = tensor.end;
  }
  if (end != data_bytes) std::abort();
  // What was read is written and read back as the same.
  const std::string encoded = EncodeSafetensorsHeader(*header);
  const absl::StatusOr<SafetensorsHeader> again =
      ParseSafetensorsHeader(std::string_view(encoded).substr(kSafetensorsLengthBytes), data_bytes);
  if (!again.ok() || again->tensors.size() != header->tensors.size() || again->metadata != header->metadata) {
    std::abort();
  }
  return 0;
}
