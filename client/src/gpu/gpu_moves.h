// What a trainer gives the GPU to do, and in which order: gradients are packed and leave, parameters come back,
// residents are updated, weights stream.
//
//   trainer's stream   backward ...  -> event -+
//   pack stream        (wait) pack into a slot -+-> [daemon] submit: the daemon copies the slot
//   down stream                       (wait) copy to host memory -> [trainer] submit
//   up stream      (after the verdict) copy parameters back -> event of the bucket
//   trainer's stream                  (wait for that event) next forward
//
// `direct` is `trainer`, but the kernel that packs stores into the host's memory, and only sums are copied down.
//
// It waits for nothing and has no threads but the mover's queues: gpu_plane.h waits around it, and the fault simulator
// runs it in virtual time.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_MOVES_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_MOVES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/src/core/step_progress.h"
#include "client/src/gpu/gpu_layout.h"
#include "client/src/gpu/gradient_packer.h"
#include "client/src/gpu/gradient_sums.h"
#include "client/src/gpu/resident_buckets.h"
#include "client/src/gpu/slot_waits.h"
#include "client/src/status.h"
#include "kernels/gpu/mover.h"
#include "kernels/gpu/weight_stream.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

class GpuMoves {
 public:
  struct Memory {
    kernels::CudaPointer gpu = 0;                // what `layout` describes
    std::span<std::byte> gradients, parameters;  // the host's
    std::vector<uint32_t> slots;                 // of units that stream (kernels::UnitMemory)
  };
  // From the queue of arrivals.
  struct Events {
    // An entry is to be submitted, in the order in which it was given; or its gradient could not be copied.
    std::function<void(const kernels::CudaStatus& done, const superoffload_ring_entry& entry)> arrived;
    std::function<void(uint32_t slot)> slot_free;  // a gradient of its has been copied
  };

  // `buckets`, the memory and `pack_stream`, on which nobody else launches anything, outlive it. The device must be
  // current. `make_queue`: see kernels::Mover.
  static Status Open(std::shared_ptr<const kernels::GpuDevice> device, const ModelLayout& model,
                     const superoffload_gpu_options& options, const std::vector<GpuBucket>* buckets,
                     const GpuLayout& layout, const Memory& memory, kernels::CudaStream pack_stream, Events events,
                     kernels::MakeQueue make_queue, std::unique_ptr<GpuMoves>* moves);

  // Waits for what it has issued; callbacks run. Nobody may call it any more.
  ~GpuMoves();
  GpuMoves(const GpuMoves&) = delete;
  GpuMoves& operator=(const GpuMoves&) = delete;

  kernels::Mover& mover() { return *mover_; }
  GradientPacker& packer() { return *packer_; }
  kernels::WeightStream& weights() { return *weights_; }
  bool resident(uint32_t bucket) const { return residents_->contains(bucket); }

  // No gradient is on its way into the host's memory afterwards, and none will be.
  Status EndLandings();

  // Who copies: enum superoffload_mover. TRAINER at first. Before the first step, and before SetResident.
  void set_kind(uint32_t kind) { kind_ = kind; }

  // Where the host has the bucket's gradient of the next step: one of two slots, or of its log.
  uint32_t HostSlotOf(uint32_t bucket, uint32_t next_slot, uint64_t committed_steps) const;

  // The trainer's thread, as all up to SetResident; the device must be current. `entry` is the GRADIENT_READY of a
  // bucket whose gradient is packed into device slot `slot`, which is taken, or into the host's `host_slot`.
  Status CheckGradient(uint32_t bucket, std::span<const BucketTensor> tensors, kernels::CudaStream stream) const;
  Status SubmitGradient(superoffload_ring_entry entry, uint32_t slot, uint32_t host_slot,
                        std::span<const BucketTensor> tensors, kernels::DType dtype, kernels::CudaStream stream,
                        Pass pass);

  // Whether passes before have left what the bucket's next one can be added to: they may still wait for its slot.
  bool SumIssued(uint32_t bucket) { return sums_->Issued(bucket); }

  // Any other; END_STEP once everything that may still read the parameters has run.
  Status Submit(superoffload_ring_entry entry);

  // The bucket's parameters are final: `stream` waits for the copy that brings them.
  Status StreamWaits(uint32_t bucket, kernels::CudaStream stream);

  // See superoffload_gpu_set_resident. `state` is the mapping of the state memory. Waits.
  Status SetResident(uint32_t count, const std::byte* state);
  // Of a resident bucket; 0: it is not.
  kernels::CudaPointer ResidentMasters(uint32_t bucket) const { return residents_->masters(bucket); }

  // The thread that takes completions, of each before anybody else learns of it: copies what has become due. An error:
  // nothing can go on.
  Status OnCompletion(const superoffload_ring_entry& entry);

  // After a verdict that commits: the daemon has yet to copy these buckets' parameters to the GPU.
  void ExpectLandings(StepProgress* progress) const;

 private:
  GpuMoves(std::shared_ptr<const kernels::GpuDevice> device, const std::vector<GpuBucket>* buckets,
           const GpuLayout& layout, const Memory& memory, Events events);

  Status OpenMover(kernels::MakeQueue make_queue);
  Status Pack(uint32_t bucket, uint32_t slot, uint32_t host_slot, std::span<const BucketTensor> tensors,
              kernels::DType dtype, kernels::CudaStream stream, Pass pass);
  Status SubmitPacked(superoffload_ring_entry entry, uint32_t slot);
  uint16_t FlagsOf(uint32_t bucket) const;
  bool StillRead(uint32_t bucket) const;  // what the last step has published of it may be copied again
  Status MoveDown(superoffload_ring_entry entry, uint32_t slot, uint32_t host_slot, Pass pass);
  Status OnVerdict(const superoffload_ring_entry& entry);

  // Whether the bucket's gradients go into its log: the daemon need not publish its parameters.
  bool Logs(uint32_t bucket) const { return resident(bucket) && buckets_[bucket].log_slots > 0; }
  // Whether the daemon copies the bucket's parameters to the GPU.
  bool DaemonCopiesUp(uint32_t bucket) const {
    return kind_ == SUPEROFFLOAD_MOVER_DAEMON && !resident(bucket) && !buckets_[bucket].streams();
  }
  // Whether the kernel that packs stores into the host's memory, which must be free when it is launched.
  bool Direct(uint32_t bucket) const {
    return kind_ == SUPEROFFLOAD_MOVER_DIRECT && !resident(bucket) && !buckets_[bucket].one_slot();
  }

  const std::shared_ptr<const kernels::GpuDevice> device_;
  const std::vector<GpuBucket>& buckets_;
  const GpuLayout layout_;
  const Memory memory_;
  const Events events_;
  std::atomic<uint32_t> kind_ = SUPEROFFLOAD_MOVER_TRAINER;
  std::unique_ptr<GradientPacker> packer_;
  std::optional<ResidentBuckets> residents_;
  std::unique_ptr<kernels::Mover> mover_;
  std::unique_ptr<kernels::WeightStream> weights_;
  std::optional<GradientSums> sums_;
  SlotWaits waits_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_MOVES_H_
