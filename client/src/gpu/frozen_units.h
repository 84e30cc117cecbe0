// Weights that stream and never change: those of blocks that nobody trains, as the base of a low-rank adaptation.
//
// They lie in host memory of the caller's, unit by unit, and take turns at slots of GPU memory as units of an optimizer
// do (weight_stream.h), without one: no daemon knows of them.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_FROZEN_UNITS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_FROZEN_UNITS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "client/src/status.h"
#include "kernels/gpu/mover.h"
#include "kernels/gpu/shared_gpu_memory.h"
#include "kernels/gpu/weight_stream.h"

namespace superoffload::client {

class FrozenUnits {
 public:
  // Unit i is the `bytes[i]` of `host` from the end of unit i - 1 on; each begins in a page of its own, on the host and
  // on the GPU. `host` outlives it. No unit stays. RESOURCE_EXHAUSTED: out of GPU memory, or too little of it is to be
  // registered. UNIMPLEMENTED: the GPU has no virtual memory management.
  static Status Open(int ordinal, std::span<std::byte> host, std::span<const uint64_t> bytes, uint32_t slots,
                     std::unique_ptr<FrozenUnits>* units);
  ~FrozenUnits();
  FrozenUnits(const FrozenUnits&) = delete;
  FrozenUnits& operator=(const FrozenUnits&) = delete;

  size_t count() const { return count_; }
  uint64_t slot_bytes() const { return memory_->units()->slot_bytes(); }
  kernels::CudaPointer AddressOf(uint32_t unit) const;

  // As of an optimizer's units (superoffload_gpu_read_unit, superoffload_gpu_has_unit, superoffload_gpu_keep_units).
  Status Read(uint32_t unit, kernels::CudaStream stream);
  Status Has(uint32_t unit, uint32_t* has) const;
  Status Keep(std::span<const uint32_t> units);

 private:
  FrozenUnits(std::shared_ptr<const kernels::GpuDevice> device, size_t count, uint32_t slots)
      : device_(std::move(device)), count_(count), slots_(slots) {}
  Status Open(std::span<std::byte> host, std::span<const uint64_t> bytes);
  Status CheckUnit(uint32_t unit) const;

  const std::shared_ptr<const kernels::GpuDevice> device_;
  const size_t count_;
  const uint32_t slots_;
  std::shared_ptr<kernels::SharedGpuMemory> memory_;
  std::unique_ptr<kernels::Mover> mover_;
  std::unique_ptr<kernels::WeightStream> stream_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_FROZEN_UNITS_H_
