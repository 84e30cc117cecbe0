// Runs callbacks in order, each once the GPU has done what was issued before it, so that nobody who issues work waits
// in the driver.
#ifndef SUPEROFFLOAD_KERNELS_GPU_COMPLETION_QUEUE_H_
#define SUPEROFFLOAD_KERNELS_GPU_COMPLETION_QUEUE_H_

#include <functional>

#include "kernels/gpu/cuda_driver.h"

namespace superoffload::kernels {

// Thread-safe.
class CompletionQueue {
 public:
  // OK, or why the GPU did not do it. Callbacks run one at a time, with the device current, and never inside of a call
  // of the queue's.
  using Callback = std::function<void(const CudaStatus&)>;

  // Runs what is queued first.
  virtual ~CompletionQueue() = default;

  // Runs `callback` when the stream has done what was issued on it so far. The device must be current. An error means
  // that it will not run.
  virtual CudaStatus After(CudaStream stream, Callback callback) = 0;

  // Runs `callback` when those before it have run.
  virtual void Then(Callback callback) = 0;

  // Waits until everything has run. Not from a callback.
  virtual void WaitEmpty() = 0;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_COMPLETION_QUEUE_H_
