// Indexes of checkpoints: what is accepted names groups that exist and files without a path.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "server/checkpoint/index.h"

using namespace superoffload::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<Index> index = ParseIndex({reinterpret_cast<const char*>(data), size});
  if (!index.ok()) return 0;
  for (const auto& [name, group] : index->parameter_groups) {
    if (group >= index->groups.size()) std::abort();
  }
  for (const auto& [tensor, file] : index->tensor_files) {
    if (file.find('/') != std::string::npos || file == "..") std::abort();
  }
  const absl::StatusOr<Index> again = ParseIndex(EncodeIndex(*index));
  if (!again.ok() || again->tensor_files != index->tensor_files || again->file_crc32 != index->file_crc32) std::abort();
  return 0;
}
