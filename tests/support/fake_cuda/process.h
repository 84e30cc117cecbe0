// A process as the fake driver sees it, whatever the clock: devices, memory, copies and launches, no kinder than
// hardware. Device memory is not the host's (memory.h), copies of memory that is not registered wait, launches that no
// GPU could run are refused (launch.h), and whatever touches memory that is not there ends the process's use of the
// GPU.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_PROCESS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_PROCESS_H_

#include <atomic>
#include <cstddef>
#include <functional>

#include "tests/support/fake_cuda/memory.h"

namespace superoffload::fake_cuda {

class Process : public simulator::Process {
 public:
  // `memory` outlives it; several processes may have the same.
  Process(simulator::Clock* clock, Memory* memory) : simulator::Process(clock), memory_(*memory) {}

  const kernels::CudaDriver& driver() const override;
  int TakeContext(kernels::CudaDevice device) override;
  void GiveContextBack(kernels::CudaDevice device) override { memory_.GiveContextBack(device); }
  int Copy(const simulator::GpuCopy& copy, kernels::CudaStream stream) override;

  Machine machine() const { return memory_.machine(); }
  Memory& memory() const { return memory_; }

  using Done = std::function<void()>;
  // `move(first, bytes)` moves a piece of it now. `done` once all of them have been.
  virtual void Move(const simulator::GpuCopy& copy, const std::function<void(size_t first, size_t bytes)>& move,
                    const Done& done) {
    move(0, copy.bytes);
    done();
  }

  // Does the work of a kernel, or of a copy within the GPU, some time from now; then calls `done`.
  virtual void Work(const std::function<void()>& work, const Done& done) {
    work();
    done();
  }

  // Whether a block of a kernel has threads, which may wait for each other.
  virtual bool has_threads() const { return false; }

  int pageable_copies() const { return pageable_copies_; }  // that have waited

 private:
  Memory& memory_;
  std::atomic<int> pageable_copies_ = 0;
};

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_PROCESS_H_
