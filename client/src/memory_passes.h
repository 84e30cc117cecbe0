// Passes over many ranges of memory at once, with threads of their own, which end with the call.
#ifndef SUPEROFFLOAD_CLIENT_SRC_MEMORY_PASSES_H_
#define SUPEROFFLOAD_CLIENT_SRC_MEMORY_PASSES_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "superoffload/superoffload.h"

namespace superoffload::client {

// digests[i] becomes that of ranges[i]; copies where a range says so.
void CopyAndDigest(std::span<const superoffload_range> ranges, size_t threads, std::span<uint64_t> digests);

// Index of a range whose `from` and `to` differ, ranges.size() when none does. `every_bytes` 0 compares all; else
// samples (kernels/digest/digest.h), of which `place` is the place.
size_t FindDifference(std::span<const superoffload_range> ranges, size_t threads, size_t every_bytes, size_t place);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_MEMORY_PASSES_H_
