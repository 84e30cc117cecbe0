#include "kernels/gpu/pinned_memory.h"

#include <string>

namespace superoffload::kernels {

CudaStatus PinnedMemory::Allocate(std::shared_ptr<const GpuDevice> device, size_t bytes, PinnedMemory* memory) {
  PinnedMemory made;
  if (bytes > 0) {
    const CudaDriver& driver = device->driver();
    if (CudaStatus status = driver.Status(driver.MemHostAlloc(&made.data_, bytes, kCudaHostAllocPortable),
                                          "allocating " + std::to_string(bytes) + " bytes of pinned host memory");
        !status.ok()) {
      return status;
    }
  }
  made.device_ = std::move(device);
  *memory = std::move(made);
  return {};
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  const CurrentDevice current(*device_);
  device_->driver().MemFreeHost(data_);
}

}  // namespace superoffload::kernels
