// Where parameters lie in GPU memory when some of them stream: those that stay, and behind them the slots, of which
// each has room for the largest unit.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_

#include <cstdint>
#include <span>

#include "client/src/status.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// See superoffload_gpu_lay_out.
Status LayOutStreams(std::span<const superoffload_bucket> buckets, uint32_t slots, std::span<uint64_t> gpu_offsets,
                     uint64_t* bytes);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_
