#include "server/memory/crc32.h"

#include <zlib.h>

namespace superoffload::memory {

uint32_t Crc32(const void* data, size_t bytes, uint32_t before) {
  return static_cast<uint32_t>(::crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

}  // namespace superoffload::memory
