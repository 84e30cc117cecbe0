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

// Copies each range.
void Copy(std::span<const superoffload_range> ranges, size_t threads);

// Index of a range whose `from` and `to` differ, ranges.size() when none does.
size_t FindDifference(std::span<const superoffload_range> ranges, size_t threads);

// The same, by a line of 64 bytes in every kSampleEveryBytes (kernels/digest/digest.h), each `turn` the next one: a
// difference of that length is always seen, a shorter one that stays in one of so many turns.
inline constexpr size_t kSampleEveryBytes = 4096;
size_t FindDifferenceInSamples(std::span<const superoffload_range> ranges, size_t threads, uint64_t turn);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_MEMORY_PASSES_H_
