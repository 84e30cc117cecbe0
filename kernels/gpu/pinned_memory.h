// Small host memory for copies that do not wait: tables, sums.
#ifndef SUPEROFFLOAD_KERNELS_GPU_PINNED_MEMORY_H_
#define SUPEROFFLOAD_KERNELS_GPU_PINNED_MEMORY_H_

#include <cstddef>
#include <memory>

#include "kernels/gpu/cuda_device.h"

namespace superoffload::kernels {

// The driver's own pages: memory of the heap cannot be registered, because two objects on one page cannot both be.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept
      : device_(std::move(other.device_)), data_(std::exchange(other.data_, nullptr)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~PinnedMemory();

  // The device must be current. 0 bytes: no memory. RESOURCE_EXHAUSTED: the host has no more.
  static CudaStatus Allocate(std::shared_ptr<const GpuDevice> device, size_t bytes, PinnedMemory* memory);

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  std::shared_ptr<const GpuDevice> device_;
  void* data_ = nullptr;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_PINNED_MEMORY_H_
