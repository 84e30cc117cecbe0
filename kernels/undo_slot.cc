#include "kernels/undo_slot.h"

#include <cstring>

namespace superoffload::kernels {

size_t UndoTornGranule(const UndoSlot& slot, size_t n, std::span<const StateArray> arrays, const StateView& state) {
  if (slot.torn == 0) return 0;
  const size_t first = slot.torn >> 16, count = slot.torn & 0xffff;
  if (count > kUndoElements || first > n || count > n - first) return n + 1;
  for (size_t array = 0; array < arrays.size(); ++array) {
    const size_t bytes = DTypeBytes(arrays[array].dtype);
    const auto* const old = reinterpret_cast<const std::byte*>(slot.old[array]);
    auto* const to = static_cast<std::byte*>(state.arrays[array]);
    for (size_t i = first; i < first + count; ++i) {
      std::memcpy(to + i * bytes, old + i % kUndoElements * bytes, bytes);
    }
  }
  return first;
}

}  // namespace superoffload::kernels
