// Collectives among ranks of a data-parallel trainer that brings none of its own: NCCL, loaded at run time, so that
// nobody needs it who does not use it.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_COLLECTIVE_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_COLLECTIVE_H_

#include <cstdint>
#include <memory>

#include "client/src/status.h"
#include "kernels/base/dtype.h"
#include "kernels/gpu/cuda_device.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

// See superoffload_gpu.h. UNAVAILABLE: there is no NCCL.
Status MakeCollectiveId(superoffload_collective_id* id);

class Collective {
 public:
  // Waits for the other ranks.
  static Status Create(int ordinal, const superoffload_collective_id& id, uint32_t ranks, uint32_t rank,
                       std::unique_ptr<Collective>* collective);
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  Status ReduceScatter(kernels::CudaPointer from, kernels::CudaPointer to, uint64_t elements, kernels::DType dtype,
                       bool average, kernels::CudaStream stream) const;
  Status AllGather(kernels::CudaPointer from, kernels::CudaPointer to, uint64_t elements, kernels::DType dtype,
                   kernels::CudaStream stream) const;

 private:
  explicit Collective(std::shared_ptr<const kernels::GpuDevice> device) : device_(std::move(device)) {}

  const std::shared_ptr<const kernels::GpuDevice> device_;
  struct NcclCommunicator* communicator_ = nullptr;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_COLLECTIVE_H_
