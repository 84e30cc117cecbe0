// CRC-32 as zlib and Python's zlib.crc32 compute it.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_CRC32_H_
#define SUPEROFFLOAD_SERVER_MEMORY_CRC32_H_

#include <cstddef>
#include <cstdint>

namespace superoffload::memory {

// Of `bytes` bytes that follow those whose CRC-32 is `before`.
uint32_t Crc32(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_CRC32_H_
