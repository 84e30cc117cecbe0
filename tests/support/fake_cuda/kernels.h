// The GPU kernels' sources, run on the host on the memory that a GPU could reach.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_

#include <functional>

namespace superoffload::fake_cuda {

class Process;

struct Kernel {
  const char* name;
  unsigned most_threads;  // of a block, by its launch bounds
  unsigned static_bytes;  // of shared memory that its code declares
  // What a launch does when its turn comes; takes its own copy of the arguments.
  std::function<std::function<void()>(Process& process, void** arguments, unsigned blocks, unsigned threads)> bind;
};

// Null: there is no such kernel.
const Kernel* FindKernel(const char* name);

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
