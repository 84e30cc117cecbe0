// The GPU memory of one attachment: a trainer's, which a daemon may have mapped. It is laid out as the client library
// lays it out: the parameters, behind them the device slots with their sums, and then the units that stream.
//
// It is memory of the tests' fake GPU (tests/support/fake_cuda/memory.h): whoever reaches for it other than through the
// driver faults. Copies move real bytes, in pieces, each as late as it likes: whoever changes what is being copied
// tears it.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_MEMORY_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "kernels/gpu/mover.h"
#include "kernels/gpu/unit_memory.h"
#include "tests/fault/simulated/ground.h"
#include "tests/support/fake_cuda/process.h"

namespace superoffload::faults {

// DataType of optimizer.proto.
uint32_t NumberOf(kernels::DType dtype);

class SimulatedGpuMemory : public std::enable_shared_from_this<SimulatedGpuMemory> {
 public:
  explicit SimulatedGpuMemory(Ground* ground);
  ~SimulatedGpuMemory();

  const std::vector<client::GpuBucket>& buckets() const { return buckets_; }
  const client::GpuLayout& layout() const { return layout_; }
  kernels::CudaPointer base() const { return base_; }
  // Where the model's kernels find them.
  std::span<std::byte> parameters(uint32_t bucket);

  // What the daemon's mover is told.
  std::vector<kernels::MovedBucket> MovedBuckets() const;

  // Of units that stream, by unit: which have the same memory (kernels::UnitMemory).
  const std::vector<uint32_t>& slots() const { return slots_; }
  void MapUnits(std::vector<uint32_t> slots);

  // Whether allocations may find no memory.
  void LetAllocationsFail(bool may) { finds_none_ = may; }

  // What a process that uses it has of the driver. `alive()`: of the process; nothing that it began ends otherwise.
  // `waits()`: its copies are done at once, since it waits for them.
  std::unique_ptr<fake_cuda::Process> MakeProcess(simulator::Clock* clock, std::function<bool()> alive,
                                                  std::function<bool()> waits);

 private:
  void Place();
  void LayOutStreams();
  kernels::CudaAllocation Create(uint64_t bytes);
  void Map(uint64_t offset, uint64_t bytes, kernels::CudaAllocation allocation);

  class User;

  Ground& ground_;
  std::vector<client::GpuBucket> buckets_;
  client::GpuLayout layout_;
  bool finds_none_ = false;
  fake_cuda::Memory memory_;
  kernels::CudaPointer base_ = 0;
  uint64_t bytes_ = 0, addresses_ = 0;  // mapped at first, and reserved
  kernels::UnitRanges units_;
  std::vector<uint32_t> slots_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_MEMORY_H_
