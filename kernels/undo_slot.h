// The undo slot: an update of state in place that survives a kill at any instruction.
//
// A range of elements is updated a few at a time, a granule. The old values of a granule are saved in the slot, then
// the granule is named in `torn`, then it is overwritten; so at most that granule is torn, and UndoTornGranule puts it
// back:
//
//   0 ........ updated for good ........ | torn granule | ........ as before the pass ........ n
//
// A killed process leaves memory as its program order made it, on every architecture: the core completes what it has
// retired. So only the compiler must be kept from reordering, which atomic_signal_fence does. (After a crash of the
// machine nothing of shared memory is left; that is what checkpoints are for.)
//
// A slot lies in shared memory, one per worker thread, and is reused for one range after the other. The layout is
// fixed.
#ifndef SUPEROFFLOAD_KERNELS_UNDO_SLOT_H_
#define SUPEROFFLOAD_KERNELS_UNDO_SLOT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/algorithm.h"

namespace superoffload::kernels {

// Elements whose old values are kept, at least. Recovery needs the last granule only, but stores that hit the same
// lines again and again cost more than a slot that stays in the first-level cache (kernels/bench/README.md has the
// measurement).
inline constexpr size_t kUndoElements = 64;

// As many, where a granule is a block: of two, because one is still named while the next one is saved.
constexpr size_t UndoElements(size_t block_elements) {
  return 2 * block_elements > kUndoElements ? 2 * block_elements : kUndoElements;
}

// What the old values follow: of each state array as many bytes, the element i of the range at i modulo the elements
// that are kept; arrays of fewer bytes use the front.
struct alignas(64) UndoSlot {
  uint64_t claim;  // the owner's name for the range that is being updated; 0: none
  uint64_t torn;   // TornGranule of the granule that was saved last; 0: none
  uint64_t reserved[6];

  // Of an algorithm with blocks of kBlock elements, whose array has an entry per kPerEntry elements.
  template <typename Entry, size_t kBlock = 1, size_t kPerEntry = 1>
  Entry* Old(size_t array, size_t element) {
    constexpr size_t kKept = UndoElements(kBlock);
    return reinterpret_cast<Entry*>(OldBytes(array, kKept)) + element % kKept / kPerEntry;
  }
  std::byte* OldBytes(size_t array, size_t kept) {
    return reinterpret_cast<std::byte*>(this + 1) + array * kept * sizeof(float);
  }
  const std::byte* OldBytes(size_t array, size_t kept) const {
    return const_cast<UndoSlot*>(this)->OldBytes(array, kept);
  }
};
static_assert(sizeof(UndoSlot) == 64);

// Of a slot with its old values. Algorithms of few arrays have room for four, as they always had.
constexpr size_t UndoSlotBytes(const Algorithm& algorithm) {
  const size_t arrays = algorithm.arrays.size() > 4 ? algorithm.arrays.size() : 4;
  return sizeof(UndoSlot) + arrays * UndoElements(algorithm.block_elements) * sizeof(float);
}

// A slot of its own, outside of a record.
class OwnedUndoSlot {
 public:
  explicit OwnedUndoSlot(const Algorithm& algorithm) : lines_(UndoSlotBytes(algorithm) / sizeof(UndoSlot)) {}
  UndoSlot* get() { return lines_.data(); }
  UndoSlot* operator->() { return get(); }
  UndoSlot& operator*() { return *get(); }

 private:
  std::vector<UndoSlot> lines_;
};

// Elements [first, first + count) of a range, in one word so that it changes at once.
constexpr uint64_t TornGranule(size_t first, size_t count) { return uint64_t{first} << 16 | count; }

// The compiler may not move memory accesses across it.
inline void KeepOrder() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Before a pass that is given the slot: `claim`, not 0, names what it updates.
inline void BeginUndo(UndoSlot& slot, uint64_t claim) {
  slot.claim = 0;
  KeepOrder();
  slot.torn = 0;
  KeepOrder();
  slot.claim = claim;
  KeepOrder();
}

// Before each call that covers elements from `first` on, under the same claim: the granule before it stays as it is.
// Without this, where elements between two calls are left out, the next granule that is saved could take the place of
// the one that is still named.
inline void BeginRange(UndoSlot& slot, size_t first) {
  KeepOrder();
  slot.torn = TornGranule(first, 0);
  KeepOrder();
}

// After the owner has recorded that the range is complete; from then on nothing is to be undone.
inline void EndUndo(UndoSlot& slot) {
  KeepOrder();
  slot.claim = 0;
  KeepOrder();
}

// After a kill inside a pass over the `n` elements at `state`: undoes the torn granule and returns how many elements
// from the start are updated. The others are as before the pass. A slot that contradicts itself undoes nothing and
// returns n + 1.
size_t UndoTornGranule(const UndoSlot& slot, size_t n, const Algorithm& algorithm, const StateView& state);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_UNDO_SLOT_H_
