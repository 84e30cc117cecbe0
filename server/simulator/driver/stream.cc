#include "server/simulator/driver/stream.h"

#include <utility>

namespace superoffload::simulator {

void EventRecord::Reach(double now) {
  std::vector<std::function<void()>> waiting;
  {
    std::lock_guard lock(mu_);
    reached_at_ = now;
    reached_.store(true, std::memory_order_release);
    waiting.swap(waiting_);
  }
  for (const std::function<void()>& wake : waiting) wake();
}

void EventRecord::Then(std::function<void()> then) {
  {
    std::lock_guard lock(mu_);
    if (!reached_) return waiting_.push_back(std::move(then));
  }
  then();
}

void Stream::Record(GpuEvent* event) {
  const auto record = std::make_shared<EventRecord>(capture());
  event->latest = record;
  Do([this, record](std::function<void()> done) {
    record->Reach(Now());
    done();
  });
}

void Stream::Wait(const GpuEvent& event) {
  Do([record = event.latest](std::function<void()> done) {
    record == nullptr ? done() : record->Then(std::move(done));
  });
}

void Stream::HostCall(std::function<void()> call) {
  Do([call = std::move(call)](std::function<void()> done) {
    call();
    done();
  });
}

void Stream::Do(Operation operation) {
  {
    std::lock_guard lock(mu_);
    if (aborted_ || capture_ != nullptr) return;
    operations_.push_back(std::move(operation));
    if (running_) return;
    running_ = true;
  }
  Begin();
}

void Stream::Abort() {
  std::lock_guard lock(mu_);
  aborted_ = true;
  operations_.clear();
  running_ = false;
}

bool Stream::idle() const {
  std::lock_guard lock(mu_);
  return !running_;
}

void Stream::AwaitIdle() {
  std::unique_lock lock(mu_);
  became_idle_.wait(lock, [this] { return !running_; });
}

std::shared_ptr<Capture> Stream::capture() const {
  std::lock_guard lock(mu_);
  return capture_;
}

std::shared_ptr<Capture> Stream::SetCapture(std::shared_ptr<Capture> capture) {
  std::lock_guard lock(mu_);
  return std::exchange(capture_, std::move(capture));
}

// A loop, not a recursion: a stream may have thousands of operations that are done at once.
void Stream::Run() {
  std::unique_lock lock(mu_);
  while (!operations_.empty()) {
    {
      const Operation operation = std::move(operations_.front());
      operations_.pop_front();
      under_way_ = UnderWay::kInside;
      lock.unlock();
      Dawdle();
      operation([this] { OperationDone(); });
    }
    lock.lock();
    if (aborted_) return;
    if (under_way_ == UnderWay::kInside) {
      under_way_ = UnderWay::kOutside;
      return;
    }
  }
  running_ = false;
  became_idle_.notify_all();
}

void Stream::OperationDone() {
  {
    std::lock_guard lock(mu_);
    if (under_way_ == UnderWay::kInside) {
      under_way_ = UnderWay::kDone;
      return;
    }
  }
  Continue();
}

}  // namespace superoffload::simulator
