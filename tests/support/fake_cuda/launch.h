// Modules, their functions, and what a launch may ask for: what no GPU could make resident is refused, as the driver
// does. No handle is ever used again, so that who uses one of a module that was unloaded learns of it.
//
// Blocks run one after the other, the last one first: a GPU promises no order, nor that two of them are there at once.
// Who waits for another block ends the process (tests/unit/kernels/cuda/fake_cuda.h).
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_LAUNCH_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_LAUNCH_H_

#include "kernels/gpu/cuda_driver.h"

namespace superoffload::fake_cuda {

class Process;

struct Dimensions {
  unsigned x, y, z;
};

inline constexpr unsigned kMostThreads = 1024, kMostGridX = 0x7fffffff, kMostGridYz = 0xffff, kMostBlockZ = 64;
inline constexpr unsigned kSharedBytes = 48 << 10;  // of a block that was granted no more

// All return a CUresult.
int LoadModule(Process& process, void** module);
int UnloadModule(Process& process, void* module);
int GetFunction(void** function, void* module, const char* name);

// Grants a function so much dynamic shared memory, where at first it has what is left of 48 KiB.
int AllowShared(Process& process, void* function, int dynamic_bytes);

// kInvalidValue: dimensions or shared memory that no block can have. kOutOfResources: more threads than the kernel was
// compiled for, so that their registers do not fit. A launch that comes to run when its module is unloaded is a fault.
int Launch(Process& process, void* function, Dimensions grid, Dimensions block, unsigned dynamic_bytes,
           kernels::CudaStream stream, void** arguments);

// Null: there is no such function.
const char* NameOf(void* function);

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_LAUNCH_H_
