#include "tests/support/fake_cuda/stream.h"

#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {
namespace {

std::atomic<int> capturing_streams = 0;
std::mutex streams_mu;
std::set<Stream*> streams;

}  // namespace

void Record::Await() const {
  while (!reached.load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

Stream::Stream() : thread_([this] { Run(); }) {
  CountObject(1);
  std::lock_guard lock(streams_mu);
  streams.insert(this);
}

Stream::~Stream() {
  {
    std::lock_guard lock(streams_mu);
    streams.erase(this);
  }
  EndCapture();
  Synchronize();
  {
    std::lock_guard lock(mu_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  CountObject(-1);
}

void Stream::Do(std::function<void()> work) {
  if (captures_) return;
  {
    std::lock_guard lock(mu_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::Synchronize() {
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return work_.empty(); });
}

void Stream::BeginCapture() {
  if (!captures_.exchange(true)) ++capturing_streams;
}

void Stream::EndCapture() {
  if (captures_.exchange(false)) --capturing_streams;
}

void Stream::Run() {
  std::minstd_rand random(std::random_device{}());
  const int delay = Setting("FAKE_CUDA_DELAY");
  std::unique_lock lock(mu_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !work_.empty(); });
    if (work_.empty()) return;
    const std::function<void()> work = work_.front();
    lock.unlock();
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(delay)));
    work();
    lock.lock();
    work_.pop_front();
    changed_.notify_all();
  }
}

int Issue(void* stream, std::function<void()> work) {
  if (stream != nullptr) {
    static_cast<Stream*>(stream)->Do(std::move(work));
  } else {
    work();
  }
  return 0;
}

int Synchronize(void* stream) {
  if (stream == nullptr) return capturing_streams > 0 ? kCaptureImplicit : 0;
  if (static_cast<Stream*>(stream)->captures()) return kCaptureUnsupported;
  static_cast<Stream*>(stream)->Synchronize();
  return 0;
}

int SynchronizeAll() {
  if (capturing_streams > 0) return kCaptureUnsupported;
  std::lock_guard lock(streams_mu);
  for (Stream* const stream : streams) stream->Synchronize();
  return 0;
}

int RecordEvent(Event* event, void* stream) {
  const auto record = std::make_shared<Record>();
  record->captured = stream != nullptr && static_cast<Stream*>(stream)->captures();
  event->latest = record;
  return Issue(stream, [=] {
    record->reached_at = std::chrono::steady_clock::now();
    record->reached.store(true, std::memory_order_release);
  });
}

int WaitForEvent(void* stream, const Event& event) {
  const std::shared_ptr<Record> record = event.latest;
  if (record == nullptr) return 0;
  if (record->captured) {
    if (stream == nullptr) return kCaptureImplicit;
    static_cast<Stream*>(stream)->BeginCapture();
    return 0;
  }
  return Issue(stream, [=] { record->Await(); });
}

int IsCapturing(void* stream, int* status) {
  *status = 0;
  if (stream == nullptr) return capturing_streams > 0 ? kCaptureImplicit : 0;
  *status = static_cast<Stream*>(stream)->captures() ? 1 : 0;
  return 0;
}

}  // namespace superoffload::fake_cuda
