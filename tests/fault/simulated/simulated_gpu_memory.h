// The GPU memory of one attachment: a trainer's, which a daemon may have mapped. It is laid out as the client library
// lays it out: the parameters, and behind them the device slots with their sums.
//
// Copies move real bytes, in pieces, each as late as it likes: whoever changes what is being copied tears it.
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
#include "server/simulator/simulated_cuda.h"
#include "tests/fault/simulated/ground.h"

namespace superoffload::faults {

class SimulatedGpuMemory : public std::enable_shared_from_this<SimulatedGpuMemory> {
 public:
  explicit SimulatedGpuMemory(Ground* ground);

  const std::vector<client::GpuBucket>& buckets() const { return buckets_; }
  const client::GpuLayout& layout() const { return layout_; }
  kernels::CudaPointer base() const { return reinterpret_cast<kernels::CudaPointer>(bytes_.data()); }
  std::span<std::byte> parameters() { return std::span(bytes_).first(ground_.layout.parameters_bytes); }

  // What the daemon's mover is told.
  std::vector<kernels::MovedBucket> MovedBuckets() const;

  // For a process that is there while `alive`.
  void Copy(const simulator::SimulatedCuda::Copy& copy, std::function<bool()> alive, std::function<void()> done);

 private:
  void CopyRest(const simulator::SimulatedCuda::Copy& copy, size_t done_bytes, std::function<bool()> alive,
                std::function<void()> done);

  Ground& ground_;
  std::vector<client::GpuBucket> buckets_;
  client::GpuLayout layout_;
  std::vector<std::byte> bytes_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_GPU_MEMORY_H_
