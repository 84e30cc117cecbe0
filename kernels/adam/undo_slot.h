// The undo slot: an update of state in place that survives a kill at any instruction.
//
// A run of elements is updated granule by granule. The old values of a granule are saved in the slot, then counted as
// saved, then overwritten; so at most the granule that was saved last is torn, and RestoreTornBlock puts it back:
//
//   0 ............ updated for good ............ | torn granule | ........ as before the pass ........ n
//                                                saved - granule      saved
//
// A killed process leaves memory as its program order made it, on every architecture: the core completes what it has
// retired. So only the compiler must be kept from reordering, which atomic_signal_fence does. (After a crash of the
// machine nothing of shared memory is left; that is what checkpoints are for.)
//
// A slot lies in shared memory, one per worker thread, and is reused for run after run. The layout is fixed.
#ifndef SUPEROFFLOAD_KERNELS_ADAM_UNDO_SLOT_H_
#define SUPEROFFLOAD_KERNELS_ADAM_UNDO_SLOT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {

// Old values kept, of which recovery needs the last granule only: reusing one cache line for every granule would cost
// more than cycling through some (kernels/bench/README.md has the measurement).
inline constexpr size_t kUndoElements = 1024;

struct alignas(64) UndoSlot {
  uint64_t run;      // the owner's name for the run that is being updated; 0: none
  uint64_t saved;    // elements of the run that were saved
  uint64_t granule;  // elements that are saved and overwritten together; at most kUndoElements
  uint64_t reserved[5];
  float p[kUndoElements];  // element i of the run at i mod kUndoElements
  float m[kUndoElements];
  float v[kUndoElements];
};
static_assert(sizeof(UndoSlot) == 64 + 3 * sizeof(float) * kUndoElements);
static_assert(offsetof(UndoSlot, p) == 64);

// The compiler may not move memory accesses across it.
inline void KeepOrder() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Before a pass that is given the slot: `run`, not 0, names what it updates.
inline void BeginUndo(UndoSlot& slot, uint64_t run) {
  slot.run = 0;
  KeepOrder();
  slot.saved = 0;
  KeepOrder();
  slot.run = run;
  KeepOrder();
}

// After the owner has recorded that the run is complete; from then on nothing is to be restored.
inline void EndUndo(UndoSlot& slot) {
  KeepOrder();
  slot.run = 0;
  KeepOrder();
}

// After a kill inside a pass over the `n` elements at `state`: restores the torn granule and returns how many elements
// from the start are updated. The others are as before the pass. A slot that contradicts itself restores nothing and
// returns n + 1.
size_t RestoreTornBlock(const UndoSlot& slot, size_t n, AdamState state);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ADAM_UNDO_SLOT_H_
