// A completion queue whose callbacks run on a thread of its own, which waits in the driver.
#ifndef SUPEROFFLOAD_KERNELS_GPU_COMPLETION_THREAD_H_
#define SUPEROFFLOAD_KERNELS_GPU_COMPLETION_THREAD_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/gpu/completion_queue.h"
#include "kernels/gpu/cuda_device.h"

namespace superoffload::kernels {

class CompletionThread final : public CompletionQueue {
 public:
  // `name`: the thread's, for people. std::system_error: there is no thread to be had.
  CompletionThread(std::shared_ptr<const GpuDevice> device, const char* name);
  ~CompletionThread() override;

  CudaStatus After(CudaStream stream, Callback callback) override;
  void Then(Callback callback) override;
  void WaitEmpty() override;

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

#endif  // SUPEROFFLOAD_KERNELS_GPU_COMPLETION_THREAD_H_
