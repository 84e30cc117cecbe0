// Enough of CUDA C++ to run a kernel's source on the host: blocks one after the other, a thread for each of theirs.
// Includes must come before; the .cu files after.
//
// The last block runs first: a GPU promises no order, and not that two blocks are there at once. A block that waits for
// another may wait for ever there. Here it does, and the process ends with a sentence. Atomics, fences and cooperative
// groups, by which blocks would talk, do not compile.
#ifndef SUPEROFFLOAD_TESTS_UNIT_KERNELS_CUDA_FAKE_CUDA_H_
#define SUPEROFFLOAD_TESTS_UNIT_KERNELS_CUDA_FAKE_CUDA_H_

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
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
// A block takes milliseconds. Who tests it may be less patient.
inline std::chrono::milliseconds fake_block_patience = std::chrono::minutes(5);

inline void __syncthreads() { fake_block_barrier->arrive_and_wait(); }

// Ends the process when a block does not end.
class FakeBlockWatch {
 public:
  explicit FakeBlockWatch(unsigned blocks) : blocks_(blocks), watcher_([this] { Watch(); }) {}
  ~FakeBlockWatch() {
    Begin(blocks_);
    watcher_.join();
  }
  void Begin(unsigned block) {
    {
      std::lock_guard lock(mu_);
      block_ = block;
      ++begun_;
    }
    changed_.notify_all();
  }

 private:
  void Watch() {
    std::unique_lock lock(mu_);
    while (block_ != blocks_) {
      const unsigned before = begun_;
      if (changed_.wait_for(lock, fake_block_patience, [&] { return begun_ != before; }) || before == 0) continue;
      std::fprintf(stderr, "block %u of %u does not end: does it wait for one that a GPU need not run before?\n",
                   block_, blocks_);
      std::abort();
    }
  }

  const unsigned blocks_;
  std::mutex mu_;
  std::condition_variable changed_;
  unsigned block_ = 0, begun_ = 0;
  std::thread watcher_;
};

// For kernels whose threads never wait for each other.
template <typename Kernel, typename Arguments>
void LaunchFakeInTurn(Kernel kernel, unsigned blocks, unsigned threads, const Arguments& arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  FakeBlockWatch watch(blocks);
  for (unsigned block = blocks; block-- > 0;) {
    watch.Begin(block);
    blockIdx.x = block;
    for (unsigned thread = threads; thread-- > 0;) {
      threadIdx.x = thread;
      kernel(arguments);
    }
  }
}

template <typename Kernel, typename Arguments>
void LaunchFake(Kernel kernel, unsigned blocks, unsigned threads, const Arguments& arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  FakeBlockWatch watch(blocks);
  for (unsigned block = blocks; block-- > 0;) {
    watch.Begin(block);
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
