// CRC-32 as zlib and Python's zlib.crc32 compute it.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_CRC32_H_
#define SUPEROFFLOAD_SERVER_MEMORY_CRC32_H_

#include <cstddef>
#include <cstdint>

namespace superoffload::memory {

// Of `bytes` bytes that follow those whose CRC-32 is `before`.
uint32_t Crc32(const void* data, size_t bytes, uint32_t before = 0);

// Of what has the CRC-32 `first`, followed by `second_bytes` bytes that have `second`.
uint32_t Crc32Combine(uint32_t first, uint32_t second, size_t second_bytes);

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_CRC32_H_
