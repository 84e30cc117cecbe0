#include "kernels/adam/undo_slot.h"

namespace superoffload::kernels {

size_t RestoreTornBlock(const UndoSlot& slot, size_t n, AdamState state) {
  if (slot.torn == 0) return 0;
  const size_t first = slot.torn >> 16, count = slot.torn & 0xffff;
  if (count > kUndoElements || first > n || count > n - first) return n + 1;
  for (size_t i = first; i < first + count; ++i) {
    state.p[i] = slot.p[i % kUndoElements];
    state.m[i] = slot.m[i % kUndoElements];
    state.v[i] = slot.v[i % kUndoElements];
  }
  return first;
}

}  // namespace superoffload::kernels
