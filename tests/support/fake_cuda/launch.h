// The GPU kernels' sources, run on the host on the memory that a GPU could reach; and what a launch may ask for: what
// no GPU could make resident is refused, as the driver does.
//
// Blocks run one after the other, the last one first: a GPU promises no order, nor that two of them are there at once.
// Who waits for another block ends the process (tests/unit/kernels/cuda/fake_cuda.h).
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_LAUNCH_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_LAUNCH_H_

#include <functional>

#include "kernels/gpu/cuda_driver.h"
#include "tests/support/fake_cuda/process.h"

namespace superoffload::fake_cuda {

struct Kernel {
  const char* name;
  unsigned most_threads;  // of a block, by its launch bounds
  unsigned static_bytes;  // of shared memory that its code declares
  // What a launch does when its turn comes; takes its own copy of the arguments.
  std::function<std::function<void()>(Process& process, void** arguments, unsigned blocks, unsigned threads)> bind;
};
// Null: there is no such kernel.
const Kernel* FindKernel(const char* name);

inline constexpr unsigned kMostThreads = 1024, kMostGridX = 0x7fffffff, kMostGridYz = 0xffff, kMostBlockZ = 64;
inline constexpr unsigned kSharedBytes = 48 << 10;  // of a block that was granted no more

// The driver's functions. A launch that comes to run when its module is unloaded is a fault.
int LoadModule(Process& process, kernels::CudaModule* module, const void* image);
int UnloadModule(Process& process, kernels::CudaModule module);
int GetFunction(Process& process, kernels::CudaFunction* function, kernels::CudaModule module, const char* name);
int SetAttribute(Process& process, kernels::CudaFunction function, int attribute, int value);
int Launch(Process& process, kernels::CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
           unsigned block_x, unsigned block_y, unsigned block_z, unsigned dynamic_bytes, kernels::CudaStream stream,
           void** arguments, void** extra);

// Null: there is no such function.
const char* NameOf(kernels::CudaFunction function);

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_LAUNCH_H_
