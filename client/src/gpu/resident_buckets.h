// Buckets whose optimizer state is on the GPU, too: the last ones.
//
// They are replicas: the daemon gets their gradients like all others and does the same steps, with the same bits,
// later. So a trainer that dies takes nothing with it, and checkpoints, clipping and skips are what they are without
// residency.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_BUCKETS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_BUCKETS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/gpu/resident_steps.h"
#include "client/src/status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/gpu/mover.h"
#include "kernels/gpu/shared_gpu_memory.h"
#include "superoffload/superoffload_gpu.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::client {

// The device must be current in every call that copies or launches. The trainer's thread changes what is resident and
// submits; the completions' thread updates; no update is due while the former changes.
class ResidentBuckets {
 public:
  // `buckets` outlive it.
  ResidentBuckets(std::shared_ptr<const kernels::GpuDevice> device, const std::vector<GpuBucket>* buckets,
                  std::unique_ptr<ResidentSteps> steps);

  bool contains(uint32_t bucket) const { return bucket >= first_; }

  // Where its masters are; 0: it is not resident. The thread that changes what is.
  kernels::CudaPointer masters(uint32_t bucket) const {
    const auto found = residents_.find(bucket);
    return found == residents_.end() ? 0 : found->second.array(0);
  }

  // Makes the last `count` resident; `state` is the mapping of the state memory. Waits. RESOURCE_EXHAUSTED: out of GPU
  // memory; fewer are resident.
  Status SetCount(uint32_t count, const std::byte* state, kernels::CudaStream stream);

  // Keeps a resident bucket's gradient until the verdict.
  Status KeepGradient(uint32_t bucket, kernels::CudaPointer slot, kernels::CudaStream stream) const;

  // Of every submission. One thread.
  void OnSubmission(const superoffload_ring_entry& entry) { steps_->OnSubmission(entry); }

  // Applies the gradients that were kept, on the mover's up stream, and writes the parameters to `gpu`, where all
  // parameters lie. The step commits.
  Status Update(const superoffload_verdict_payload& verdict, const kernels::CudaKernels& kernels,
                kernels::CudaPointer gpu, kernels::Mover* mover);

 private:
  struct Resident {
    GpuBucket bucket;
    std::vector<uint64_t> offsets;                     // in `memory`: of each state array, then of the gradient
    std::unique_ptr<kernels::SharedGpuMemory> memory;  // the state arrays, then the gradient
    kernels::CudaPointer array(size_t i) const { return memory->data() + offsets[i]; }
    kernels::CudaPointer gradient() const { return memory->data() + offsets.back(); }
  };

  Status Add(uint32_t index, const std::byte* state, kernels::CudaStream stream);
  Status UpdateOne(const Resident& resident, const kernels::CudaKernels& kernels,
                   const std::vector<ResidentSteps::Run>& runs, kernels::CudaPointer theta,
                   kernels::CudaStream stream) const;

  const std::shared_ptr<const kernels::GpuDevice> device_;
  const std::vector<GpuBucket>& buckets_;
  const std::unique_ptr<ResidentSteps> steps_;
  std::map<uint32_t, Resident> residents_;
  std::atomic<uint32_t> first_;  // as many as there are buckets: none
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_RESIDENT_BUCKETS_H_
