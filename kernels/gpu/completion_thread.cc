#include "kernels/gpu/completion_thread.h"

#include <pthread.h>

#include <utility>

namespace superoffload::kernels {

CompletionThread::CompletionThread(std::shared_ptr<const GpuDevice> device, const char* name)
    : device_(std::move(device)), thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), name);
}

CompletionThread::~CompletionThread() {
  {
    std::lock_guard lock(mu_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

CudaStatus CompletionThread::After(CudaStream stream, Callback callback) {
  const CudaDriver& driver = device_->driver();
  Item item{{}, std::move(callback)};
  if (CudaStatus status = TakeEvent(&item.event); !status.ok()) return status;
  if (CudaStatus status = driver.Status(driver.EventRecord(item.event.get(), stream), "recording an event");
      !status.ok()) {
    return status;
  }
  Push(std::move(item));
  return {};
}

void CompletionThread::Then(Callback callback) { Push({{}, std::move(callback)}); }

void CompletionThread::WaitEmpty() {
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return items_.empty(); });
}

CudaStatus CompletionThread::TakeEvent(OwnedEvent* event) {
  std::lock_guard lock(mu_);
  if (events_.empty()) return MakeEvent(*device_, event);
  *event = std::move(events_.back());
  events_.pop_back();
  return {};
}

void CompletionThread::Push(Item item) {
  {
    std::lock_guard lock(mu_);
    items_.push_back(std::move(item));
  }
  changed_.notify_all();
}

void CompletionThread::Run() {
  const CudaDriver& driver = device_->driver();
  const CurrentDevice current(*device_);
  std::unique_lock lock(mu_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !items_.empty(); });
    if (items_.empty()) return;
    Item& item = items_.front();  // stays where it is: a deque moves nothing when its end grows
    lock.unlock();
    CudaStatus status;
    if (item.event.get() != nullptr) {
      status = driver.Status(driver.EventSynchronize(item.event.get()), "waiting for the GPU");
    }
    item.callback(status);
    item.callback = nullptr;
    lock.lock();
    if (item.event.get() != nullptr) events_.push_back(std::move(item.event));
    items_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace superoffload::kernels
