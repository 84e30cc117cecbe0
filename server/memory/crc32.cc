#include "server/memory/crc32.h"

#include <zlib.h>

namespace superoffload::memory {

uint32_t Crc32(const void* data, size_t bytes, uint32_t before) {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

uint32_t Crc32Combine(uint32_t first, uint32_t second, size_t second_bytes) {
  return static_cast<uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

}  // namespace superoffload::memory
