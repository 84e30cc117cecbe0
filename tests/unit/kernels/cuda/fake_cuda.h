// Enough of CUDA C++ to run a kernel's source on the host: blocks one after the other, a thread for each of theirs.
// Includes must come before; the .cu files after.
#ifndef SUPEROFFLOAD_TESTS_UNIT_KERNELS_CUDA_FAKE_CUDA_H_
#define SUPEROFFLOAD_TESTS_UNIT_KERNELS_CUDA_FAKE_CUDA_H_

#include <barrier>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct FakeDim3 {
  unsigned x = 0;
};
inline thread_local FakeDim3 threadIdx, blockIdx;
inline FakeDim3 blockDim, gridDim;
inline std::barrier<>* fake_block_barrier = nullptr;

inline void __syncthreads() { fake_block_barrier->arrive_and_wait(); }

// For kernels whose threads never wait for each other.
template <typename Kernel, typename Arguments>
void LaunchFakeInTurn(Kernel kernel, unsigned blocks, unsigned threads, const Arguments& arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments);
  }
}

template <typename Kernel, typename Arguments>
void LaunchFake(Kernel kernel, unsigned blocks, unsigned threads, const Arguments& arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (unsigned block = 0; block < blocks; ++block) {
    std::barrier<> barrier(threads);
    fake_block_barrier = &barrier;
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < threads; ++thread) {
      running.emplace_back([&, block, thread] {
        blockIdx.x = block;
        threadIdx.x = thread;
        kernel(arguments);
      });
    }
    for (std::thread& t : running) t.join();
  }
}

#endif  // SUPEROFFLOAD_TESTS_UNIT_KERNELS_CUDA_FAKE_CUDA_H_
