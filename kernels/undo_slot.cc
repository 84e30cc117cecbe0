#include "kernels/undo_slot.h"

#include <cstring>

namespace superoffload::kernels {

size_t UndoTornGranule(const UndoSlot& slot, size_t n, const Algorithm& algorithm, const StateView& state) {
  if (slot.torn == 0) return 0;
  const size_t first = slot.torn >> 16, count = slot.torn & 0xffff;
  const size_t kept = UndoElements(algorithm.block_elements);
  const size_t most = algorithm.block_elements > 1 ? algorithm.block_elements : kept;
  if (count > most || first > n || count > n - first || first % algorithm.block_elements != 0) return n + 1;
  for (size_t a = 0; a < algorithm.arrays.size(); ++a) {
    const StateArray& array = algorithm.arrays[a];
    const size_t bytes = DTypeBytes(array.dtype);
    const std::byte* const old = slot.OldBytes(a, kept);
    auto* const to = static_cast<std::byte*>(state.arrays[a]);
    for (size_t i = first; i < first + count; i += array.elements_per_entry) {
      std::memcpy(to + array.Bytes(i), old + array.Bytes(i % kept), bytes);
    }
  }
  return first;
}

}  // namespace superoffload::kernels
