// Runs callbacks in order, each once the GPU has done what was issued before it, on a thread of its own: nobody else
// ever waits in the driver.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_COMPLETION_QUEUE_H_
#define SUPEROFFLOAD_KERNELS_CUDA_COMPLETION_QUEUE_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/cuda/cuda_device.h"

namespace superoffload::kernels {

// Thread-safe.
class CompletionQueue {
 public:
  // OK, or why the GPU did not do it.
  using Callback = std::function<void(const CudaStatus&)>;

  explicit CompletionQueue(std::shared_ptr<const GpuDevice> device);

  // Runs what is queued first.
  ~CompletionQueue();

  // Runs `callback` when the stream has done what was issued on it so far. The device must be current. An error means
  // that it will not run.
  CudaStatus After(CudaStream stream, Callback callback);

  // Runs `callback` when those before it have run.
  void Then(Callback callback);

  // Waits until everything has run. Not from a callback.
  void WaitEmpty();

 private:
  struct Item {
    OwnedEvent event;  // none: nothing to wait for
    Callback callback;
  };

  void Run();
  CudaStatus TakeEvent(OwnedEvent* event);
  void Push(Item item);

  const std::shared_ptr<const GpuDevice> device_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Item> items_;  // the first one is running
  // Free ones. An event comes back only after its wait has ended, and every record has one wait: so none is recorded
  // anew while somebody still has to wait for what it stood for.
  std::vector<OwnedEvent> events_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_COMPLETION_QUEUE_H_
