// The GPU's side of an attachment: how gradients leave it and parameters come back.
//
//   trainer's stream   backward ...  -> event -+
//   pack stream        (wait) pack into a slot -+-> [daemon] submit: the daemon copies the slot
//   down stream                       (wait) copy to host memory -> [trainer] submit
//   up stream      (after the verdict) copy parameters back -> event of the bucket
//   trainer's stream                  (wait for that event) next forward
//
// Who submits is a completion queue, so that the trainer's threads never wait in the driver, and an entry is submitted
// only when its gradient is where the daemon will look for it. END_STEP is submitted only when the trainer's streams have
// done what they were given before it: parameters change when the step commits, whoever copies, and nothing that was
// launched before the step's end may see it.
//
// The daemon may have died whenever a stream waits: so streams wait for events of this process only.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_PLANE_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_PLANE_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/gpu/gpu_status.h"
#include "client/src/gpu/gradient_slots.h"
#include "client/src/gpu/resident_buckets.h"
#include "client/src/status.h"
#include "kernels/cuda/completion_queue.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/shared_gpu_memory.h"
#include "kernels/cuda/upload_order.h"
#include "superoffload/superoffload_gpu.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::client {

class GpuPlane {
 public:
  // What the plane uses of its attachment.
  struct Attached {
    std::span<std::byte> parameters, gradients;  // mapped
    // Asks the daemon to map the GPU memory.
    std::function<Status(superoffload_device_request*, int descriptor)> share;
    std::function<bool()> daemon_gone;
    // To the submission ring. Called by one thread at a time.
    std::function<Status(const superoffload_ring_entry&)> submit;
  };

  // With `memory` of a plane of the same optimizer, or null to allocate.
  static Status Create(const superoffload_gpu_options& options, Attached attached,
                       std::shared_ptr<kernels::SharedGpuMemory> memory, std::unique_ptr<GpuPlane>* plane);

  // Waits for everything it has issued.
  ~GpuPlane();

  // Measures the movers that work, and takes the best of those that the options allow. Between steps; somebody must
  // call OnCompletion meanwhile. The parameters on the GPU are undefined afterwards.
  Status ChooseMover();
  const superoffload_gpu_report& report() const { return report_; }

  const std::shared_ptr<kernels::SharedGpuMemory>& memory() const { return memory_; }
  kernels::CudaPointer parameters() const { return memory_->data(); }
  kernels::CudaStream pack_stream() const { return pack_.get(); }

  Status Pull();
  Status Push(kernels::CudaStream stream);

  // Gradients that are handed over from now on wait for what `stream` has been given so far.
  Status PackAfter(kernels::CudaStream stream);

  // The trainer's thread. `entry` is the GRADIENT_READY that becomes due.
  Status HandOver(superoffload_ring_entry entry, uint32_t gradient_slot, const superoffload_tensor* tensors,
                  uint32_t count, kernels::DType dtype, kernels::CudaStream stream);

  // Any other submission, after those before it.
  Status Submit(const superoffload_ring_entry& entry);

  // The thread that takes completions, for each one, before anybody else learns of it.
  Status OnCompletion(const superoffload_ring_entry& entry);

  // Nothing will come any more: whoever waits in here gets this status.
  void Fail(const Status& status);

  // What went wrong on the GPU, or in submitting what it had done.
  Status failure() const { return slots_.failure(); }

  // Whether a step that commits has a LANDED for the bucket.
  bool WaitsForLanding(uint32_t bucket) const { return mover_ == SUPEROFFLOAD_MOVER_DAEMON && !resident(bucket); }

  // FAILED_PRECONDITION: the stream is being captured into a CUDA graph.
  Status CheckStream(kernels::CudaStream stream) const;

  // The parameters have landed, or the copy that brings them was issued; see Attachment::AwaitParameters.
  Status StreamWaits(uint32_t bucket, kernels::CudaStream stream);

  // See superoffload_gpu_set_resident. `state` is the mapping of the state memory.
  Status SetResident(uint32_t count, const std::byte* state);
  bool resident(uint32_t bucket) const { return bucket >= first_resident_; }

 private:
  GpuPlane(const superoffload_gpu_options& options, Attached attached,
           std::shared_ptr<kernels::SharedGpuMemory> memory);
  Status Open(const superoffload_gpu_options& options);
  Status Allocate(kernels::Sharing sharing);
  Status Share();
  void Register(std::span<std::byte> host);
  void Note(const std::string& text);

  Status Pack(uint32_t bucket, uint32_t slot, uint32_t gradient_slot, const superoffload_tensor* tensors,
              uint32_t count, kernels::DType dtype);
  // Has a stream of this plane wait for what the trainer's `stream` has been given so far. The device is current.
  Status WaitFor(kernels::CudaStream stream, kernels::CudaStream side_stream);
  Status CopyDown(uint32_t bucket, uint32_t slot, uint32_t gradient_slot);
  void OnDown(superoffload_ring_entry entry, uint32_t slot, const kernels::CudaStatus& status);
  Status CopyUp(uint32_t bucket);
  Status CopyUpWhatIsDue();
  Status SubmitEnd(const superoffload_ring_entry& entry);
  Status Measure(uint32_t mover, double* seconds);
  Status ProbeRound(uint32_t mover, uint32_t bucket);
  Status UpdateResident(const superoffload_ring_entry& verdict);
  Status Check(int result, const char* call) const { return FromCuda(device_->driver().Status(result, call)); }

  const Attached attached_;
  const uint32_t wanted_mover_;
  const kernels::Sharing wanted_sharing_;
  uint32_t next_slot_;  // of host gradients, at the attach
  std::vector<GpuBucket> buckets_;
  GpuLayout layout_;
  superoffload_gpu_report report_{};
  std::atomic<uint32_t> mover_ = SUPEROFFLOAD_MOVER_TRAINER;

  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::CudaKernels kernels_;
  std::shared_ptr<kernels::SharedGpuMemory> memory_;  // outlives the plane where another one takes it over
  std::vector<std::byte*> registered_;
  kernels::PinnedMemory staging_;  // per slot its table of tensors, and the sums of its chunks
  kernels::PackedTensor* tables_ = nullptr;
  double* sums_ = nullptr;
  uint64_t max_chunks_ = 0;

  kernels::OwnedStream pack_, down_, up_;
  // An event is recorded anew only after its last wait was issued: `ready_` and `packed_` are waited for in the call
  // that records them. A bucket's `landed_` is recorded when its next parameters come, which its next gradient causes,
  // and that is packed after a wait for it.
  kernels::OwnedEvent ready_, packed_;
  std::vector<kernels::OwnedEvent> landed_;  // per bucket; trainer and direct movers, and resident buckets

  GradientSlots slots_;
  std::vector<kernels::CudaStream> streams_;  // of the trainer, named in the open step; the submitting thread's
  kernels::UploadOrder uploads_;              // the completions' thread's

  ResidentBuckets resident_;
  std::atomic<uint32_t> first_resident_;  // bucket; as many as there are: none
  const std::array<uint64_t, 3> state_offsets_;
  std::vector<kernels::AdamHyperparameters> groups_;  // the submitting thread's
  std::mutex ended_mu_;
  std::vector<kernels::AdamHyperparameters> ended_groups_;  // as END_STEP was submitted with
  double ended_scale_ = 1;

  std::mutex probe_mu_;
  std::condition_variable probed_;
  uint32_t probes_under_way_ = 0;

  std::optional<kernels::CompletionQueue> queue_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_PLANE_H_
