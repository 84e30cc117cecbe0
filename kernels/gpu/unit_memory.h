// GPU memory of units that stream. Each has addresses of its own, for ever; what changes is the memory behind them. Of
// several it may be the same, a slot, which they share:
//
//   addresses   [ unit 0 | unit 1 | unit 2 | unit 3 | unit 4 ]
//   memory        slot 0   slot 1   slot 0   slot 1   slot 2     unit 4 has its slot for itself: it stays
#ifndef SUPEROFFLOAD_KERNELS_GPU_UNIT_MEMORY_H_
#define SUPEROFFLOAD_KERNELS_GPU_UNIT_MEMORY_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/gpu/cuda_device.h"

namespace superoffload::kernels {

// Units' addresses are multiples of it; the driver's granularity divides it.
inline constexpr uint64_t kUnitGranule = 2u << 20;
constexpr uint64_t WholeGranules(uint64_t bytes) { return (bytes + kUnitGranule - 1) / kUnitGranule * kUnitGranule; }

// Where units lie, one behind the other; in bytes, from the base of GPU memory on.
struct UnitRanges {
  uint64_t offset = 0, bytes = 0;  // of each
  uint64_t count = 0;

  uint64_t end() const { return offset + count * bytes; }
};

// A slot for each unit: those that stay have one for themselves, and the others take turns at `shared`.
std::vector<uint32_t> SlotsOf(const std::vector<bool>& stays, uint32_t shared);

// The device must be current in every call.
class UnitMemory {
 public:
  // The addresses from `base` on are reserved, and outlive it. There is no memory yet.
  UnitMemory(std::shared_ptr<const GpuDevice> device, CudaPointer base, const UnitRanges& ranges)
      : device_(std::move(device)), base_(base), ranges_(ranges) {}
  ~UnitMemory();
  UnitMemory(const UnitMemory&) = delete;
  UnitMemory& operator=(const UnitMemory&) = delete;

  uint64_t count() const { return ranges_.count; }
  uint64_t slot_bytes() const { return ranges_.bytes; }
  uint64_t bytes() const { return memory_.size() * slot_bytes(); }  // of memory
  const std::vector<uint32_t>& slots() const { return slots_; }     // by unit; empty: there is no memory

  // Unit i's memory is slot `slots[i]` from now on; what is there is undefined. There are as many slots as are named;
  // none: no memory. Nobody may use a unit meanwhile. RESOURCE_EXHAUSTED: out of HBM; all is as before.
  CudaStatus Map(std::vector<uint32_t> slots);

 private:
  CudaStatus Allocate(size_t slots);
  CudaStatus MapNext(uint32_t slot);
  CudaStatus UnmapAll();
  CudaStatus ReleaseFrom(size_t slot);
  CudaPointer AddressOf(uint64_t unit) const { return base_ + ranges_.offset + unit * ranges_.bytes; }

  const std::shared_ptr<const GpuDevice> device_;
  const CudaPointer base_;
  const UnitRanges ranges_;
  std::vector<CudaAllocation> memory_;  // by slot
  std::vector<uint32_t> slots_;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_UNIT_MEMORY_H_
