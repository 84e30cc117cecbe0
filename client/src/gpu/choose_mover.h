// Who copies for an attachment: measured where nobody says.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_CHOOSE_MOVER_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_CHOOSE_MOVER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/gpu/gradient_packer.h"
#include "client/src/status.h"
#include "kernels/gpu/mover.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

// What copies are tried with.
struct MoverTrial {
  const kernels::GpuDevice& device;
  const std::vector<GpuBucket>& buckets;
  GradientPacker& packer;
  kernels::Mover& mover;
  kernels::CudaPointer gpu;                      // base of the GPU memory
  uint32_t host_slot;                            // which no step fills yet
  std::function<Status(uint32_t bucket)> probe;  // has the daemon copy the bucket both ways, from device slot 0; waits
};

// What copies by one mover did to kernels beside them.
struct MoverTiming {
  uint32_t mover;        // enum superoffload_mover
  double lost_seconds;   // of the kernels, per round: one gradient out and its parameters back
  double round_seconds;  // of the copies
};

// One gradient packed and taken out, one bucket of parameters back, as the mover has it done; of no consequence.
Status ProbeRound(const MoverTrial& trial, uint32_t mover, uint32_t bucket);

// The first one, `trainer`, unless another saves more than noise would, and copies about as fast. `kernel_seconds`: of
// the kernels alone, per round of the first.
uint32_t BestMover(std::span<const MoverTiming> timings, double kernel_seconds);

// Measures how much the movers that work slow down kernels as the trainer's, and sets `mover` and `seconds` of the
// report to the best of those that `wanted` (enum superoffload_mover) allows. Between steps. Parameters on the GPU are
// the host's afterwards. The device must be current. FAILED_PRECONDITION: `wanted` cannot work.
Status ChooseMover(const MoverTrial& trial, uint32_t wanted, superoffload_gpu_report* report);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_CHOOSE_MOVER_H_
