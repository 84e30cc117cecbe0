#include "server/simulator/gpu_stream.h"

#include <utility>

namespace superoffload::simulator {

void GpuStream::Kernel(double seconds, std::string name) {
  Enqueue([this, seconds, name = std::move(name)](std::function<void()> done) mutable {
    const double begin = time_->now();
    time_->After(seconds, [this, begin, name = std::move(name), done = std::move(done)]() mutable {
      busy_seconds_ += time_->now() - begin;
      if (timeline_ != nullptr) timeline_->Add(lane_, std::move(name), begin, time_->now());
      done();
    });
  });
}

void GpuStream::Copy(CopyEngine* engine, double bytes, std::string name, double limit) {
  Enqueue([engine, bytes, limit, name = std::move(name)](std::function<void()> done) mutable {
    engine->Copy(bytes, limit, std::move(name), std::move(done));
  });
}

void GpuStream::Record(GpuEvent* event) {
  event->latest_ = std::make_shared<GpuEvent::Record>();
  Enqueue([record = event->latest_](std::function<void()> done) {
    record->reached = true;
    const std::vector<std::function<void()>> waiting = std::exchange(record->waiting, {});
    for (const std::function<void()>& wake : waiting) wake();
    done();
  });
}

void GpuStream::Wait(const GpuEvent& event) {
  Enqueue([record = event.latest_](std::function<void()> done) {
    if (record == nullptr || record->reached) return done();
    record->waiting.push_back(std::move(done));
  });
}

void GpuStream::HostCall(std::function<void()> call) {
  Enqueue([call = std::move(call)](std::function<void()> done) {
    call();
    done();
  });
}

void GpuStream::Abort() {
  aborted_ = true;
  operations_.clear();
  running_ = false;
}

void GpuStream::Enqueue(Operation operation) {
  if (aborted_) return;
  operations_.push_back(std::move(operation));
  if (running_) return;
  // Not from inside of the caller: a host call may not run before what enqueued it goes on.
  running_ = about_to_run_ = true;
  time_->After(0, [this] { Flush(); });
}

void GpuStream::Flush() {
  if (std::exchange(about_to_run_, false)) Run();
}

// A loop, not a recursion: a stream may have thousands of operations that are done at once.
void GpuStream::Run() {
  while (!operations_.empty()) {
    Operation operation = std::move(operations_.front());
    operations_.pop_front();
    inside_ = true;
    done_inside_ = false;
    operation([this] { inside_ ? void(done_inside_ = true) : Run(); });
    inside_ = false;
    if (!done_inside_ || aborted_) return;
  }
  running_ = false;
}

}  // namespace superoffload::simulator
