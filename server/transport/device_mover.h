// The `daemon` mover: takes the submissions of a trainer whose gradients lie in GPU memory, delivers each when its
// gradient has arrived in host memory, and has parameters copied back. The copies are kernels/gpu/mover.h's.
//
// Its streams wait for nothing of the trainer's: what a trainer submits, its GPU has done.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_MOVER_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_MOVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/gpu/mover.h"
#include "kernels/gpu/shared_gpu_memory.h"
#include "server/transport/rings.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::transport {

// The host's side of an optimizer.
struct MovedMemory {
  std::span<std::byte> gradients;
  std::span<std::byte> parameters;
  std::vector<kernels::MovedBucket> buckets;
  std::function<uint64_t()> committed_steps;  // by which steps take turns with slots
};

class DeviceMover {
 public:
  // Maps the trainer's memory, whose pieces `descriptors` came with the request. NOT_FOUND: the daemon does not see the
  // GPU. FAILED_PRECONDITION, UNAVAILABLE, RESOURCE_EXHAUSTED: the driver refuses; the trainer has to copy by itself.
  static absl::StatusOr<std::unique_ptr<DeviceMover>> Open(const superoffload_device_request& request,
                                                           std::span<const int> descriptors, MovedMemory memory,
                                                           Rings* rings);

  // With the trainer's memory mapped at `gpu`, where it stays until this is gone. `make_queue`: see kernels::Mover.
  static absl::StatusOr<std::unique_ptr<DeviceMover>> OpenMapped(const superoffload_device_request& request,
                                                                 std::shared_ptr<const kernels::GpuDevice> device,
                                                                 kernels::CudaPointer gpu, MovedMemory memory,
                                                                 Rings* rings, kernels::MakeQueue make_queue);

  // Waits for what it has issued. Nobody may call it any more.
  ~DeviceMover();

  // Takes a submission; delivers it in order, when its gradient has arrived. One thread.
  void Submit(const superoffload_ring_entry& entry);

  // FAILED_PRECONDITION, which says that `request` has to wait: a step is open. The submitting thread.
  absl::Status CheckNoOpenStep(absl::string_view request) const;

  // What the engine tells; any thread. The parameters of a step that commits are copied to the GPU, unless the trainer
  // asked for them not to be. Neither waits for anything, nor calls the driver: the engine's lock is held.
  void Published(uint64_t step, uint32_t bucket, bool speculative);
  void VerdictReached(uint64_t step, bool commits, bool speculation_stands);

 private:
  DeviceMover(const superoffload_device_request& request, MovedMemory memory, Rings* rings,
              std::shared_ptr<const kernels::GpuDevice> device)
      : request_(request),
        memory_(std::move(memory)),
        rings_(rings),
        device_(std::move(device)),
        submitted_(memory_.buckets.size()) {}
  absl::Status CheckRequest() const;
  absl::Status Map(std::span<const int> descriptors);
  absl::Status OpenMover(kernels::CudaPointer gpu, kernels::MakeQueue make_queue);
  void Begin(const superoffload_ring_entry& entry);
  void Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares);
  void RejectGradient(const superoffload_ring_entry& entry, const absl::Status& status);
  absl::Status TakeGradient(const superoffload_ring_entry& entry);
  absl::Status SetWayBack(const superoffload_ring_entry& entry);
  absl::Status CheckGradient(const superoffload_ring_entry& entry) const;
  absl::Status CopyGradient(const superoffload_ring_entry& entry);
  uint32_t HostSlotOf(const superoffload_ring_entry& entry) const;
  void OnGradient(const superoffload_ring_entry& entry, const kernels::CudaStatus& status, double sum_of_squares);

  const superoffload_device_request request_;
  MovedMemory memory_;
  Rings* const rings_;
  const std::shared_ptr<const kernels::GpuDevice> device_;
  std::unique_ptr<kernels::SharedGpuMemory> gpu_memory_;

  // The submitting thread's: what the open step may copy.
  uint64_t open_step_ = 0;
  uint64_t committed_steps_ = 0;  // as the open step began
  std::vector<bool> submitted_;

  std::unique_ptr<kernels::Mover> mover_;  // the first to go: its threads use the others
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_MOVER_H_
