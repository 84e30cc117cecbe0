#include "tests/support/fake_cuda/stream.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {
namespace {

class Stream {
 public:
  Stream() : thread_([this] { Run(); }) { CountObject(1); }
  ~Stream();

  void Do(std::function<void()> work);
  void Synchronize();

  void Capture(std::shared_ptr<CaptureState> capture);
  int EndCapture();
  std::shared_ptr<CaptureState> capture() const;

 private:
  void Run();

  std::shared_ptr<CaptureState> capture_;
  mutable std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

Stream::~Stream() {
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
  {
    std::lock_guard lock(mu_);
    if (capture_ != nullptr) return;
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::Synchronize() {
  std::unique_lock lock(mu_);
  changed_.wait(lock, [this] { return work_.empty(); });
}

void Stream::Capture(std::shared_ptr<CaptureState> capture) {
  std::lock_guard lock(mu_);
  capture_ = std::move(capture);
}

int Stream::EndCapture() {
  std::lock_guard lock(mu_);
  const std::shared_ptr<CaptureState> capture = std::exchange(capture_, nullptr);
  return capture != nullptr && capture->invalidated ? kCaptureInvalidated : 0;
}

std::shared_ptr<CaptureState> Stream::capture() const {
  std::lock_guard lock(mu_);
  return capture_;
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

// By handle. Never destroyed: streams that are left run until the process ends.
class Streams {
 public:
  void* Make() {
    const auto stream = std::make_shared<Stream>();
    std::lock_guard lock(mu_);
    handle_ += kStep;
    return streams_[reinterpret_cast<void*>(handle_)] = stream, reinterpret_cast<void*>(handle_);
  }
  // Null: there is none.
  std::shared_ptr<Stream> Find(void* handle) const {
    std::lock_guard lock(mu_);
    const auto found = streams_.find(handle);
    return found == streams_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Stream> Take(void* handle) {
    std::lock_guard lock(mu_);
    const auto taken = streams_.extract(handle);
    return taken.empty() ? nullptr : taken.mapped();
  }
  std::vector<std::shared_ptr<Stream>> All() const {
    std::vector<std::shared_ptr<Stream>> all;
    std::lock_guard lock(mu_);
    for (const auto& [handle, stream] : streams_) all.push_back(stream);
    return all;
  }

 private:
  static constexpr uintptr_t kStep = 0x100;

  mutable std::mutex mu_;
  std::map<void*, std::shared_ptr<Stream>> streams_;
  uintptr_t handle_ = 0x5f0000000000;
};

Streams& AllStreams() {
  static auto* const streams = new Streams;
  return *streams;
}

thread_local CaptureMode capture_mode = CaptureMode::kGlobal;

// Those under way, of any stream.
std::set<std::shared_ptr<CaptureState>> Captures() {
  std::set<std::shared_ptr<CaptureState>> captures;
  for (const std::shared_ptr<Stream>& stream : AllStreams().All()) {
    if (auto capture = stream->capture(); capture != nullptr) captures.insert(std::move(capture));
  }
  return captures;
}

}  // namespace

void Record::Await() const {
  while (!reached.load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void* MakeStream() { return AllStreams().Make(); }

int DestroyStream(void* stream) { return AllStreams().Take(stream) == nullptr ? kInvalidHandle : 0; }

int Issue(void* stream, std::function<void()> work) {
  if (stream == nullptr) return work(), 0;
  const auto found = AllStreams().Find(stream);
  if (found == nullptr) return kInvalidHandle;
  return found->Do(std::move(work)), 0;
}

int Synchronize(void* stream) {
  if (stream == nullptr) return Captures().empty() ? 0 : kCaptureImplicit;
  const auto found = AllStreams().Find(stream);
  if (found == nullptr) return kInvalidHandle;
  if (const auto capture = found->capture(); capture != nullptr) {
    return capture->invalidated = true, kCaptureUnsupported;
  }
  return found->Synchronize(), 0;
}

int SynchronizeAll() {
  if (const auto captures = Captures(); !captures.empty()) {
    for (const auto& capture : captures) capture->invalidated = true;
    return kCaptureUnsupported;
  }
  for (const auto& stream : AllStreams().All()) stream->Synchronize();
  return 0;
}

int RecordEvent(Event* event, void* stream) {
  const auto record = std::make_shared<Record>();
  if (stream != nullptr) {
    const auto found = AllStreams().Find(stream);
    if (found == nullptr) return kInvalidHandle;
    record->capture = found->capture();
  }
  event->latest = record;
  return Issue(stream, [=] {
    record->reached_at = std::chrono::steady_clock::now();
    record->reached.store(true, std::memory_order_release);
  });
}

int WaitForEvent(void* stream, const Event& event) {
  const auto found = stream == nullptr ? nullptr : AllStreams().Find(stream);
  if (stream != nullptr && found == nullptr) return kInvalidHandle;
  const std::shared_ptr<Record> record = event.latest;
  if (record == nullptr) return 0;
  const auto capture = found == nullptr ? nullptr : found->capture();
  if (record->capture != nullptr) {
    if (found == nullptr) return kCaptureImplicit;
    if (capture == nullptr) found->Capture(record->capture);
    return 0;
  }
  if (capture != nullptr) return capture->invalidated = true, kCaptureIsolation;  // it happened outside
  return Issue(stream, [=] { record->Await(); });
}

int IsCapturing(void* stream, int* status) {
  *status = 0;
  if (stream == nullptr) return Captures().empty() ? 0 : kCaptureImplicit;
  const auto found = AllStreams().Find(stream);
  if (found == nullptr) return kInvalidHandle;
  const auto capture = found->capture();
  *status = capture == nullptr ? 0 : capture->invalidated ? 2 : 1;
  return 0;
}

int BeginCapture(void* stream, CaptureMode mode) {
  if (stream == nullptr) return kCaptureUnsupported;
  const auto found = AllStreams().Find(stream);
  if (found == nullptr) return kInvalidHandle;
  return found->Capture(std::make_shared<CaptureState>(mode, std::this_thread::get_id())), 0;
}

int EndCapture(void* stream) {
  const auto found = AllStreams().Find(stream);
  return found == nullptr ? kInvalidHandle : found->EndCapture();
}

CaptureMode ExchangeCaptureMode(CaptureMode mode) { return std::exchange(capture_mode, mode); }

int CheckSafe() {
  if (capture_mode == CaptureMode::kRelaxed) return 0;
  int result = 0;
  for (const auto& capture : Captures()) {
    const bool own = capture->thread == std::this_thread::get_id() && capture->mode != CaptureMode::kRelaxed;
    const bool global = capture_mode == CaptureMode::kGlobal && capture->mode == CaptureMode::kGlobal;
    if (own || global) {
      capture->invalidated = true;
      result = kCaptureUnsupported;
    }
  }
  return result;
}

}  // namespace superoffload::fake_cuda
