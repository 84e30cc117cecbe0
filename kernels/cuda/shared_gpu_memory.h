// GPU memory that two processes map: one allocates and exports it, the other imports it.
//
// Two ways. Legacy IPC works for plain allocations, but not between isolated PID namespaces and not where a container
// refuses it. A descriptor of the virtual memory API (VMM) travels over a unix socket and needs neither. Both export
// memory that was allocated here for the purpose, whatever allocator the trainer's framework uses (FACTS: expandable
// segments, XLA and memory pools cannot be exported).
#ifndef SUPEROFFLOAD_KERNELS_CUDA_SHARED_GPU_MEMORY_H_
#define SUPEROFFLOAD_KERNELS_CUDA_SHARED_GPU_MEMORY_H_

#include <cstdint>
#include <memory>

#include "kernels/cuda/cuda_device.h"

namespace superoffload::kernels {

enum class Sharing : uint32_t { kNone = 0, kLegacy = 1, kDescriptor = 2 };

// What the importer needs beside the descriptor.
struct SharedGpuMemoryTicket {
  Sharing sharing = Sharing::kNone;
  CudaIpcMemoryHandle handle{};  // kLegacy
  uint64_t offset = 0;           // bytes into what the handle opens; kLegacy
  uint64_t bytes = 0;            // of the whole memory
};

// The device must be current in every call that makes or exports one.
class SharedGpuMemory {
 public:
  // At least `bytes`. kNone allocates plain memory that cannot be exported. RESOURCE_EXHAUSTED: out of HBM.
  static CudaStatus Allocate(std::shared_ptr<const GpuDevice> device, uint64_t bytes, Sharing sharing,
                             std::unique_ptr<SharedGpuMemory>* memory);

  // The exporter's memory, in this process. `descriptor` counts for kDescriptor and stays the caller's.
  static CudaStatus Import(std::shared_ptr<const GpuDevice> device, const SharedGpuMemoryTicket& ticket, int descriptor,
                           std::unique_ptr<SharedGpuMemory>* memory);

  ~SharedGpuMemory();
  SharedGpuMemory(const SharedGpuMemory&) = delete;
  SharedGpuMemory& operator=(const SharedGpuMemory&) = delete;

  Sharing sharing() const { return sharing_; }
  CudaPointer data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

  // `descriptor` becomes the caller's for kDescriptor, else -1.
  CudaStatus Export(SharedGpuMemoryTicket* ticket, int* descriptor) const;

 private:
  SharedGpuMemory(std::shared_ptr<const GpuDevice> device, Sharing sharing, uint64_t bytes)
      : device_(std::move(device)), sharing_(sharing), bytes_(bytes) {}
  CudaStatus Map();

  const std::shared_ptr<const GpuDevice> device_;
  const Sharing sharing_;
  const uint64_t bytes_;
  bool imported_ = false;
  uint64_t offset_ = 0;  // of an imported legacy mapping
  CudaPointer data_ = 0;
  CudaAllocation allocation_ = 0;  // kDescriptor
  bool reserved_ = false, mapped_ = false;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_SHARED_GPU_MEMORY_H_
