// Small values between the host and memory of XLA's on the GPU, in the order of a stream of XLA's.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_SCALARS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_SCALARS_H_

#include <cstddef>
#include <memory>
#include <span>

#include "client/src/status.h"
#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/pinned_memory.h"

namespace superoffload::client {

struct SmallCopy {
  void* host = nullptr;
  const void* device = nullptr;
  size_t bytes = 0;  // 0: nothing is copied
};

// One thread at a time.
class GpuScalars {
 public:
  explicit GpuScalars(std::shared_ptr<const kernels::GpuDevice> device) : device_(std::move(device)) {}
  // Waits for what has been written.
  ~GpuScalars();
  GpuScalars(const GpuScalars&) = delete;
  GpuScalars& operator=(const GpuScalars&) = delete;

  // To the host. Waits until the stream has computed them.
  Status Read(std::span<const SmallCopy> copies, kernels::CudaStream stream);

  // To the GPU, when the stream gets there; what is on the host may change at once. Waits for the last call's copies.
  Status Write(std::span<const SmallCopy> copies, kernels::CudaStream stream);

 private:
  // Pinned, so that the driver neither keeps the host's addresses nor waits by itself.
  struct Buffer {
    kernels::PinnedMemory memory;
    size_t bytes = 0;
  };
  Status Fit(std::span<const SmallCopy> copies, Buffer* buffer) const;
  Status WaitWritten() const;

  const std::shared_ptr<const kernels::GpuDevice> device_;
  Buffer read_, written_;
  kernels::OwnedEvent taken_;  // after the last copy out of `written_`; none: there was none
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_SCALARS_H_
