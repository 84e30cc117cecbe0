// Where parameters lie in GPU memory when some of them stream: first those that do not, then whatever else an
// attachment has there (GpuLayout), and behind that, unit by unit, those that stream.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_

#include <cstdint>
#include <span>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/status.h"
#include "kernels/gpu/unit_memory.h"
#include "superoffload/superoffload.h"

namespace superoffload::client {

// See superoffload_gpu_lay_out.
Status LayOutStreams(std::span<const superoffload_bucket> buckets, uint32_t slots, std::span<uint64_t> gpu_offsets,
                     uint64_t* bytes);

// Where the units lie, in the order of their numbers; none: nothing streams. INVALID_ARGUMENT: not where LayOutStreams
// has laid them.
Status FindUnits(std::span<const GpuBucket> buckets, const GpuLayout& layout, kernels::UnitRanges* units);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_STREAM_LAYOUT_H_
