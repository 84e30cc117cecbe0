// A trainer's GPU in one attachment: streams in virtual time, and the real client/src/gpu/gpu_moves.h above them, which
// packs, moves and keeps residents. It does what client/src/gpu/gpu_plane.h does, without its threads.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "client/src/gpu/gpu_moves.h"
#include "server/simulator/gpu_stream.h"
#include "server/simulator/simulated_cuda.h"
#include "tests/fault/simulated/attempt.h"
#include "tests/fault/simulated/ground.h"
#include "tests/fault/simulated/simulated_gpu_memory.h"

namespace superoffload::faults {

class SimulatedGpu {
 public:
  // Of the optimizer at the attach.
  struct Start {
    uint64_t committed_steps = 0;
    std::vector<uint64_t> parameter_steps;
    std::vector<engine::Scalars> groups;
  };
  // `after(event)`: an event of the trainer's, some time from now, unless it dies first. `submit`: the entry goes into
  // the ring now. `slot_free`: there is a slot again.
  SimulatedGpu(Ground* ground, std::shared_ptr<SimulatedGpuMemory> memory, const Start& start,
               std::function<void(std::function<void()>)> after,
               std::function<void(const superoffload_ring_entry&)> submit, std::function<void()> slot_free);
  ~SimulatedGpu();

  // All parameters, from the host. At the attach: nothing else is under way.
  void Pull();
  std::span<const std::byte> parameters(uint32_t bucket) const { return memory_->parameters(bucket); }

  // Each, before the trainer learns of it.
  void OnCompletion(const superoffload_ring_entry& entry);
  // After a verdict that commits.
  void ExpectLandings(client::StepProgress* progress) const { moves_->ExpectLandings(progress); }

  bool has_slot() const { return !free_slots_.empty(); }
  // Whether what passes before have brought of the bucket can be added to.
  bool SumIssued(uint32_t bucket) const { return moves_->SumIssued(bucket); }
  // Takes a slot for what a pass brings of the bucket that `entry` names. It must stay until that is submitted.
  void HandOver(const superoffload_ring_entry& entry, const AttemptPass& gradients, client::Pass pass,
                uint32_t host_slot);
  // Where the host has it.
  uint32_t HostSlotOf(uint32_t bucket, uint64_t committed_steps) const {
    return moves_->HostSlotOf(bucket, engine::SlotOf(committed_steps + 1), committed_steps);
  }
  // Anything else; END_STEP once the model has been read.
  void Submit(const superoffload_ring_entry& entry);

  // Keeps the last `count` buckets resident, or as many as fit; returns how many. Between steps, idle, and with what
  // becomes resident settled.
  uint32_t SetResident(uint32_t count);
  uint32_t residents() const;
  bool resident(uint32_t bucket) const { return moves_->resident(bucket); }
  // Whether the host's parameters stay behind.
  bool logs(uint32_t bucket) const { return resident(bucket) && ground_.layout.buckets[bucket].log_slots > 0; }

  // Which units that stream have memory of their own; between steps, idle.
  void KeepUnits(const std::vector<bool>& stays);
  size_t units() const { return memory_->slots().size(); }

  bool streams(uint32_t bucket) const { return memory_->buckets()[bucket].streams(); }
  // Buckets that must be final before any of them is read: those of its unit, or itself.
  std::span<const uint32_t> ReadTogether(const uint32_t& bucket) const;
  // The model's next kernel reads a bucket that is final; then `read`.
  void Read(uint32_t bucket, const std::function<bool(uint32_t bucket)>& is_final,
            std::function<void(const std::byte* parameters)> read);

  // Nothing more is asked of it: it finishes, and is idle.
  void End();
  bool idle() const { return cuda_.idle() && compute_.idle() && beside_.idle(); }

  void Kill();

 private:
  void FreeSlot(uint32_t slot);
  uint32_t UnitOf(uint32_t bucket) const;  // of the stream; one that streams
  void StreamWaits(uint32_t bucket);
  // Some time from now, unless the process was killed.
  void Later(std::function<void()> event);

  Ground& ground_;
  const std::shared_ptr<SimulatedGpuMemory> memory_;
  const std::function<void(const superoffload_ring_entry&)> submit_;
  const std::function<void()> slot_free_;
  std::vector<uint32_t> free_slots_;
  bool compute_is_named_ = false;  // with a gradient of the open step: its end waits for the stream
  bool waits_ = false;             // the process does until its copies are done: nothing else happens
  simulator::SimulatedCuda cuda_;
  simulator::GpuStream compute_, beside_;  // the trainer's; the model is read on the first
  kernels::OwnedStream pack_stream_;
  std::unique_ptr<client::GpuMoves> moves_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_H_
