#include "tests/support/fake_cuda/thread_clock.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

namespace superoffload::fake_cuda {
namespace {

double SecondsNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class ThreadStream final : public simulator::Stream {
 public:
  explicit ThreadStream(int delay)
      : delay_(delay), random_(std::random_device{}()), thread_([this] { RunUntilStopped(); }) {}
  ~ThreadStream() override;

  void Synchronize() override { AwaitIdle(); }

 private:
  void Begin() override { Signal(); }
  void Continue() override { Signal(); }
  void Dawdle() override;
  double Now() const override { return SecondsNow(); }
  void Signal();
  void RunUntilStopped();

  const int delay_;
  std::minstd_rand random_;
  std::mutex mu_;
  std::condition_variable changed_;
  bool signalled_ = false, stop_ = false;
  std::thread thread_;
};

ThreadStream::~ThreadStream() {
  EndCapture();
  AwaitIdle();
  {
    std::lock_guard lock(mu_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ThreadStream::Signal() {
  {
    std::lock_guard lock(mu_);
    signalled_ = true;
  }
  changed_.notify_all();
}

void ThreadStream::RunUntilStopped() {
  while (true) {
    {
      std::unique_lock lock(mu_);
      changed_.wait(lock, [this] { return stop_ || signalled_; });
      if (!signalled_) return;
      signalled_ = false;
    }
    Run();
  }
}

void ThreadStream::Dawdle() {
  if (delay_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<unsigned>(delay_)));
}

}  // namespace

std::shared_ptr<simulator::Stream> ThreadClock::MakeStream() { return std::make_shared<ThreadStream>(delay_()); }

int ThreadClock::DoNow(const simulator::Stream::Operation& operation) {
  std::mutex mu;
  std::condition_variable changed;
  bool is_done = false;
  operation([&] {
    std::lock_guard lock(mu);
    is_done = true;
    changed.notify_all();
  });
  std::unique_lock lock(mu);
  changed.wait(lock, [&] { return is_done; });
  return 0;
}

void ThreadClock::Await(const simulator::EventRecord& record) {
  while (!record.reached()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

double ThreadClock::Now() const { return SecondsNow(); }

}  // namespace superoffload::fake_cuda
