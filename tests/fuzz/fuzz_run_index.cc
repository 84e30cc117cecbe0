// Indexes of checkpoints of runs: what is accepted names the parts of its ranks, and is written as it was read.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "server/checkpoint/run_index.h"

using namespace superoffload::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<RunIndex> index = ParseRunIndex({reinterpret_cast<const char*>(data), size});
  if (!index.ok()) return 0;
  if (index->index_crc32.size() != index->moment.ranks || index->moment.ranks == 0) std::abort();
  const absl::StatusOr<RunIndex> again = ParseRunIndex(EncodeRunIndex(*index));
  if (!again.ok() || again->index_crc32 != index->index_crc32 || again->moment.lineage != index->moment.lineage) {
    std::abort();
  }
  return 0;
}
