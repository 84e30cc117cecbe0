// Where parameters lie in GPU memory when some of them stream: those that stay, and behind them the slots, of which
// each has room for the largest unit.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/src/status.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

struct StreamedUnit {
  uint32_t number = 0;  // superoffload_bucket.unit
  uint32_t slot = 0;
  std::vector<uint32_t> buckets;  // ascending
};

// Those whose numbers the buckets have, ascending; they take turns at the slots. Empty: none streams.
std::vector<StreamedUnit> UnitsOf(std::span<const uint32_t> numbers, uint32_t slots);

// See superoffload_gpu_lay_out.
Status LayOutStreams(std::span<const superoffload_bucket> buckets, uint32_t slots, std::span<uint64_t> gpu_offsets,
                     uint64_t* bytes);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_
