// The `daemon` mover: copies gradients out of a trainer's GPU memory and parameters back into it.
//
// Parameters go to the GPU when a step has committed, never before: the host's memory is the second buffer.
//
// It uses copy engines only and runs no kernels. Its streams wait for nothing of the trainer's: what a trainer submits,
// its GPU has done. A trainer that dies in mid-copy leaves copies that end, or fail; nothing can hang.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_MOVER_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_MOVER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/completion_queue.h"
#include "kernels/cuda/pinned_memory.h"
#include "kernels/cuda/shared_gpu_memory.h"
#include "kernels/cuda/upload_order.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::transport {

// Where a bucket lies on either side. Offsets and sizes are in bytes.
struct MovedBucket {
  std::array<uint64_t, 2> gradient_offsets{};  // into the host's gradient memory, per slot
  uint64_t gradient_bytes = 0;
  uint64_t parameters_offset = 0;  // into the host's parameter memory and into the GPU memory
  uint64_t parameters_bytes = 0;
  uint64_t chunks = 0;
};

struct MovedMemory {
  std::span<std::byte> gradients;
  std::span<std::byte> parameters;
  std::vector<MovedBucket> buckets;
  std::function<uint32_t()> next_slot;  // gradient slot that the next step fills
};

// What the mover tells. Called by its threads.
class MoverPeer {
 public:
  virtual ~MoverPeer() = default;
  // A submission whose gradient, if it has one, has arrived.
  virtual absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) = 0;
  virtual void Reject(const superoffload_ring_entry& entry, const absl::Status& status) = 0;
  virtual void GradientTaken(uint64_t step, uint32_t slot) = 0;
  virtual void Landed(uint64_t step, uint32_t bucket) = 0;
  virtual void Fail(const absl::Status& status) = 0;  // the GPU; nothing more will come
};

class DeviceMover {
 public:
  // Maps the trainer's memory. `descriptor` is what came with the request, or -1. NOT_FOUND: the daemon does not see
  // the GPU. FAILED_PRECONDITION, UNAVAILABLE, RESOURCE_EXHAUSTED: the driver refuses; the trainer has to copy by
  // itself.
  static absl::StatusOr<std::unique_ptr<DeviceMover>> Open(const superoffload_device_request& request, int descriptor,
                                                           MovedMemory memory, MoverPeer* peer);

  // Waits for what it has issued. Nobody may call it any more.
  ~DeviceMover();

  // Takes a submission; delivers it in order, when its gradient has arrived. One thread.
  void Submit(const superoffload_ring_entry& entry);

  // What the engine tells; any thread. The parameters of a step that commits are copied to the GPU, unless the trainer
  // asked for them not to be. Neither waits for anything, nor calls the driver: the engine's lock is held.
  void Published(uint64_t step, uint32_t bucket, bool speculative);
  void VerdictReached(uint64_t step, bool commits, bool speculation_stands);

 private:
  DeviceMover(const superoffload_device_request& request, MovedMemory memory, MoverPeer* peer,
              std::shared_ptr<const kernels::GpuDevice> device);
  absl::Status CheckRequest() const;
  absl::Status Register(std::span<std::byte> host);
  absl::Status CheckGradient(const superoffload_ring_entry& entry) const;
  void Begin(const superoffload_ring_entry& entry);
  void NoteCopyBack(const superoffload_ring_entry& entry);
  absl::Status CopyGradient(const superoffload_ring_entry& entry);
  double* SumsOf(uint64_t slot) const { return reinterpret_cast<double*>(sums_.data()) + slot * max_chunks_; }
  void OnGradient(const superoffload_ring_entry& entry, const kernels::CudaStatus& status);
  void Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares);
  void RunUploads();
  bool UploadsOrEnds() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(up_mu_) { return ends_ || uploads_.due(); }
  void CopyParameters(uint64_t step, uint32_t bucket);

  const superoffload_device_request request_;
  const MovedMemory memory_;
  MoverPeer* const peer_;
  const std::shared_ptr<const kernels::GpuDevice> device_;
  std::unique_ptr<kernels::SharedGpuMemory> gpu_memory_;
  std::vector<std::byte*> registered_;
  uint64_t max_chunks_ = 0;     // of a bucket
  kernels::PinnedMemory sums_;  // doubles: of squares, per device slot and chunk
  kernels::OwnedStream down_, up_;

  // The submitting thread's: what the open step may copy.
  uint64_t open_step_ = 0;
  uint32_t gradient_slot_ = 0;
  std::vector<bool> handed_over_;

  absl::Mutex up_mu_;  // never held in a call of the driver
  bool ends_ ABSL_GUARDED_BY(up_mu_) = false;
  kernels::UploadOrder uploads_ ABSL_GUARDED_BY(up_mu_);
  std::vector<bool> copies_back_ ABSL_GUARDED_BY(up_mu_);  // per bucket, as its last gradient asked
  std::optional<kernels::CompletionQueue> arrivals_, landings_;
  std::thread uploading_;  // issues the copies of parameters
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_MOVER_H_
