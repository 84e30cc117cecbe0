// The undo slot: an update of state in place that survives a kill at any instruction.
//
// A run of elements is updated a few at a time, a granule. The old values of a granule are saved in the slot, then the
// granule is named in `torn`, then it is overwritten; so at most that granule is torn, and RestoreTornBlock puts it
// back:
//
//   0 ........ updated for good ........ | torn granule | ........ as before the pass ........ n
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

// Old values kept. Recovery needs the last granule only, but stores that hit the same lines again and again cost more
// than a slot that stays in the first-level cache (kernels/bench/README.md has the measurement).
inline constexpr size_t kUndoElements = 64;

struct alignas(64) UndoSlot {
  uint64_t run;   // the owner's name for the run that is being updated; 0: none
  uint64_t torn;  // TornGranule of the granule that was saved last; 0: none
  uint64_t reserved[6];
  float p[kUndoElements];  // element i of the run at i mod kUndoElements
  float m[kUndoElements];
  float v[kUndoElements];
};
static_assert(sizeof(UndoSlot) == 64 + 3 * sizeof(float) * kUndoElements);
static_assert(offsetof(UndoSlot, p) == 64);

// Elements [first, first + count) of a run, in one word so that it changes at once.
constexpr uint64_t TornGranule(size_t first, size_t count) { return uint64_t{first} << 16 | count; }

// The compiler may not move memory accesses across it.
inline void KeepOrder() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Before a pass that is given the slot: `run`, not 0, names what it updates.
inline void BeginUndo(UndoSlot& slot, uint64_t run) {
  slot.run = 0;
  KeepOrder();
  slot.torn = 0;
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
