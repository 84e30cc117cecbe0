// Buckets whose optimizer state is on the GPU, too.
//
// They are replicas: the daemon gets their gradients like all others and does the same steps, with the same bits,
// later. So a trainer that dies takes nothing with it, and checkpoints, clipping and skips are what they are without
// residency.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_BUCKETS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_BUCKETS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/shared_gpu_memory.h"

namespace superoffload::client {

// The device must be current in every call. One thread at a time.
class ResidentBuckets {
 public:
  // Copies the state of a bucket to the GPU; `arrays` are masters and moments of its elements. Waits.
  // RESOURCE_EXHAUSTED: out of GPU memory.
  Status Add(const std::shared_ptr<const kernels::GpuDevice>& device, uint32_t index, const GpuBucket& bucket,
             const std::array<const float*, 3>& arrays, kernels::CudaStream stream);
  void Remove(uint32_t index) { buckets_.erase(index); }
  bool empty() const { return buckets_.empty(); }
  uint64_t bytes() const;

  // Keeps the gradient until the verdict.
  Status KeepGradient(uint32_t index, kernels::CudaPointer slot, kernels::CudaStream stream) const;

  // Applies the gradient that was kept and writes the parameters.
  Status Update(uint32_t index, const kernels::CudaKernels& kernels, const kernels::AdamStep& step,
                kernels::CudaPointer theta, kernels::CudaStream stream) const;

 private:
  struct Resident {
    std::shared_ptr<const kernels::GpuDevice> device;
    GpuBucket bucket;
    std::unique_ptr<kernels::SharedGpuMemory> memory;  // p, m, v, then the gradient
    kernels::CudaPointer array(size_t i) const { return memory->data() + i * bucket.elements * sizeof(float); }
    kernels::CudaPointer gradient() const { return array(3); }
  };

  std::map<uint32_t, Resident> buckets_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_BUCKETS_H_
