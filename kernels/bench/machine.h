// What the planner (superoffloadctl plan) wants to know of this machine's CPU.
#ifndef SUPEROFFLOAD_KERNELS_BENCH_MACHINE_H_
#define SUPEROFFLOAD_KERNELS_BENCH_MACHINE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/base/dtype.h"
#include "kernels/bench/baselines.h"

namespace superoffload::kernels {

struct MeasuredMachine {
  uint64_t memory_bytes = 0;
  int cores = 0;
  double bandwidth = 0;       // bytes per second, reads plus writes, of all cores: three arrays updated in place
  double core_bandwidth = 0;  // the same of one core
  // Seconds of one core per element of arrays that stay in its caches.
  double absorb = 0;
  double publish = 0;
  double publish_masters = 0;
};

// Medians of `repetitions` passes over `elements` (a multiple of kChunkElements) each.
MeasuredMachine MeasureMachine(const Baselines& baselines, size_t elements, DType dtype, int repetitions);

// A MachineDescription of plan.proto. There is no telling the GPU and the link: they are those of `like`.
std::string MachineText(const MeasuredMachine& machine, const std::string& like);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BENCH_MACHINE_H_
