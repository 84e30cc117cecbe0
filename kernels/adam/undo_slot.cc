#include "kernels/adam/undo_slot.h"

namespace superoffload::kernels {

size_t RestoreTornBlock(const UndoSlot& slot, size_t n, AdamState state) {
  if (slot.saved == 0) return 0;
  if (slot.saved > n || slot.granule == 0 || slot.granule > kUndoElements) return n + 1;
  const size_t first = (slot.saved - 1) / slot.granule * slot.granule;
  for (size_t i = first; i < slot.saved; ++i) {
    state.p[i] = slot.p[i % kUndoElements];
    state.m[i] = slot.m[i % kUndoElements];
    state.v[i] = slot.v[i % kUndoElements];
  }
  return first;
}

}  // namespace superoffload::kernels
