// What the GPU kernels of kernels/cuda do, on the host: for the driver of a simulated GPU, whose memory is the host's.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_KERNELS_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_KERNELS_H_

#include <functional>
#include <string_view>

namespace superoffload::faults {

// SimulatedCuda::Kernels::bind.
std::function<void()> BindKernel(std::string_view name, void** arguments);

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_KERNELS_H_
