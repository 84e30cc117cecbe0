// What outlives the daemon besides state and gradients: how far every chunk's state has come, the constants of the last
// two committed steps, and the workers' undo slots. With it a daemon that was killed at any instruction can bring an
// optimizer to its last committed step.
//
// In memory that survives the process (fixed little-endian layout, no pointers):
//
//   RecordHeader | AdamStep[2][groups] | uint64_t absorbed[chunks] | UndoSlot[kMaxWorkers]
//
// `committed` is the number t of the last committed step. Its gradient lies in slot (t-1) mod 2, that of the step
// before in the other. A chunk whose `absorbed` is k holds the state after step k: t-2, t-1 or t. So whatever is left
// to do for a chunk is to absorb the gradients of steps k+1 to t, whose constants are here.
//
// The header's fixed fields carry a CRC-32. `incomplete` says why the masters are not whole, if they are not
// (Incompleteness); zero in records of daemons that knew of fewer reasons, which are those numbers all the same.
//
// A chunk is updated under an undo slot (kernels/adam/undo_slot.h) that names the chunk and the step; `absorbed` is set
// when the chunk is done, and only then the slot is released. A step is committed by one store of `committed`, after
// its constants were written. Program order of each thread is all that a killed process needs.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_RECORD_H_
#define SUPEROFFLOAD_SERVER_ENGINE_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/adam/adam.h"
#include "kernels/adam/undo_slot.h"

namespace superoffload::engine {

// Also the most threads that a WorkerPool may have.
inline constexpr size_t kMaxWorkers = 1024;

// Why an optimizer cannot train yet: masters or moments are none that a step, a push or a restore has left. Stored.
enum class Incompleteness : uint32_t {
  kNone = 0,
  kRestoring = 1,    // a restore failed or was cut off; another restore completes it
  kNeverFilled = 2,  // created; the first push or restore completes it
  kPushing = 3,      // a push was cut off; it is finished from the parameter memory, which still has all of it
};

// The view of a record; does not own it.
class Record {
 public:
  // Of memory for so many groups and chunks (of all buckets together).
  static size_t Bytes(size_t groups, size_t chunks);

  // `memory` is zero, for a new optimizer, or a record of the same numbers; aligned to 64 bytes.
  Record(std::byte* memory, size_t groups, size_t chunks);

  // Whether `memory` is a record of these numbers. DATA_LOSS: it is damaged. FAILED_PRECONDITION says what differs.
  absl::Status Check() const;

  uint64_t committed() const;

  // The process whose trainer is attached, as optimizer/process.h has it; zeros for none.
  struct Trainer {
    uint32_t pid = 0;
    uint64_t start_time = 0;
  };
  Trainer trainer() const;
  void SetTrainer(const Trainer& trainer);

  // Names the training run that checkpoints are of; 0 in records of daemons that did not know runs.
  uint64_t run() const;
  void SetRun(uint64_t run);

  Incompleteness incompleteness() const;
  bool complete() const { return incompleteness() == Incompleteness::kNone; }
  void MarkNeverFilled();
  void BeginPush();
  void EndPush();
  void BeginRestore();
  void EndRestore(uint64_t committed);

  // Step committed() + 1 is committed, with these constants per group.
  void Commit(std::span<const kernels::AdamStep> constants);

  // Of step `t`, the last committed or the one before.
  const kernels::AdamStep& Constants(uint64_t t, uint32_t group) const;

  uint64_t absorbed(size_t chunk) const { return absorbed_[chunk]; }

  // Around an update of `chunk` that absorbs the gradient of step `t`, by `worker`; the kernel gets the slot.
  kernels::UndoSlot* BeginAbsorb(size_t worker, size_t chunk, uint64_t t);
  void EndAbsorb(size_t worker, size_t chunk, uint64_t t);

  // A chunk whose update was cut off, and how far it had come.
  struct Torn {
    size_t worker;
    size_t chunk;
    uint64_t step;
  };

  // Calls `repair` for each.
  template <typename Repair>
  void ForEachTorn(Repair repair) {
    for (size_t worker = 0; worker < kMaxWorkers; ++worker) {
      const uint64_t run = slots_[worker].run;
      if (run == 0) continue;
      const Torn torn{worker, (run & 0xffffffff) - 1, run >> 32};
      if (torn.chunk < chunks_ && absorbed_[torn.chunk] < torn.step) repair(torn);
      kernels::EndUndo(slots_[worker]);
    }
  }
  kernels::UndoSlot& slot(size_t worker) { return slots_[worker]; }

 private:
  struct Header;
  Header* const header_;
  const size_t groups_;
  const size_t chunks_;
  kernels::AdamStep* const constants_;
  uint64_t* const absorbed_;
  kernels::UndoSlot* const slots_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_RECORD_H_
