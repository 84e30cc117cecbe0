// Tells whether bytes are what they were: digests of memory, taken at the speed of memory, and comparison by samples.
//
// A digest is a number of 64 bits that depends on every byte and on its place. Four chains of 64 x 64 -> 128 bit
// multiplications, 16 bytes each, run beside each other:
//
//   chain[j] = fold((word[2j] ^ key[2j]) * (word[2j+1] ^ chain[j]))      for every line of 64 bytes; fold: high ^ low
//
// Bytes that differ have equal digests once in 2^64. It is made against accidents, not against an adversary, and lives
// as long as the process: no file and no other machine ever sees one.
#ifndef SUPEROFFLOAD_KERNELS_DIGEST_DIGEST_H_
#define SUPEROFFLOAD_KERNELS_DIGEST_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace superoffload::kernels {

// Of `from`; `seed` tells digests of equal bytes at different places apart.
uint64_t Digest(std::span<const std::byte> from, uint64_t seed);

// The same, and copies `from` to `to`, which is as long and does not overlap it.
uint64_t CopyAndDigest(std::span<const std::byte> from, std::byte* to, uint64_t seed);

// The line of 64 bytes that is compared in every `every_bytes`.
inline constexpr size_t kSampleBytes = 64;

// Whether, of every `every_bytes` (a multiple of kSampleBytes), the line at `place` is the same in both: a difference
// that is at least as long as `every_bytes` is always seen. Of a rest that is too short for `place`, the last line.
bool SamplesAreEqual(std::span<const std::byte> a, const std::byte* b, size_t every_bytes, size_t place);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_DIGEST_DIGEST_H_
