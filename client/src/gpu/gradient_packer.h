// Packs gradients into device slots on a side stream, after what the trainer's streams have been given.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GRADIENT_PACKER_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GRADIENT_PACKER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/pinned_memory.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

// The device must be current in every call. One thread at a time.
class GradientPacker {
 public:
  GradientPacker() = default;
  ~GradientPacker();
  GradientPacker(const GradientPacker&) = delete;
  GradientPacker& operator=(const GradientPacker&) = delete;

  // Once, before any other call. `gpu`: base of the memory that the layout describes. It and `stream`, on which nobody
  // else launches anything, outlive the packer.
  Status Open(std::shared_ptr<const kernels::GpuDevice> device, const GpuLayout& layout, kernels::CudaPointer gpu,
              kernels::CudaStream stream);

  const kernels::CudaKernels& kernels() const { return kernels_; }
  kernels::CudaStream stream() const { return stream_; }

  // INVALID_ARGUMENT: more tensors than the layout has room for, not in order, or beyond the bucket's elements.
  Status Check(uint32_t bucket, uint64_t elements, std::span<const BucketTensor> tensors) const;

  // What is packed from now on comes after what `stream` has been given so far, and so does the step's end.
  Status After(kernels::CudaStream stream);
  // The streams of the step so far: again, for what they have been given since; and forget them.
  Status AfterAll();
  void ForgetStreams() { streams_.clear(); }

  // `side_stream` waits for what the trainer's `stream` has been given so far. FAILED_PRECONDITION: it is captured.
  Status WaitFor(kernels::CudaStream stream, kernels::CudaStream side_stream);

  // `to` is a slot's place, or the host's. The table and the sums are the slot's.
  Status Pack(const GpuBucket& bucket, uint32_t slot, std::span<const BucketTensor> tensors, kernels::DType dtype,
              void* to, Pass pass = {});

  // `stream` waits for what has been packed so far.
  Status WaitPacked(kernels::CudaStream stream);

  // Waits for what has been packed.
  Status Synchronize() const;

  // A matrix product of as much as the slot holds, on `stream`: work as the trainer's. The slot is undefined
  // afterwards.
  Status Multiply(uint32_t slot, kernels::CudaStream stream);

 private:
  kernels::PackTable WriteTable(const GpuBucket& bucket, uint32_t slot, std::span<const BucketTensor> tensors);
  kernels::PackArguments Arguments(const GpuBucket& bucket, uint32_t slot, const kernels::PackTable& table,
                                   kernels::DType dtype, void* to, Pass pass) const;

  std::shared_ptr<const kernels::GpuDevice> device_;
  GpuLayout layout_;
  kernels::CudaPointer gpu_ = 0;
  kernels::CudaKernels kernels_;
  kernels::PinnedMemory tables_, chunk_begins_;  // per slot; kernels read them there
  kernels::CudaStream stream_ = nullptr;
  // Recorded anew only after the last wait was issued: both are waited for in the call that records them.
  kernels::OwnedEvent ready_, packed_;
  std::vector<kernels::CudaStream> streams_;  // of the trainer, named in the open step
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GRADIENT_PACKER_H_
