#include "tests/support/fake_cuda/stream.h"

#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {
namespace {

std::mutex streams_mu;
std::set<Stream*> streams;

thread_local CaptureMode capture_mode = CaptureMode::kGlobal;

// Those under way, of any stream.
std::set<std::shared_ptr<CaptureState>> Captures() {
  std::set<std::shared_ptr<CaptureState>> captures;
  std::lock_guard lock(streams_mu);
  for (const Stream* const stream : streams) {
    if (auto capture = stream->capture(); capture != nullptr) captures.insert(std::move(capture));
  }
  return captures;
}

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

int Issue(void* stream, std::function<void()> work) {
  if (stream != nullptr) {
    static_cast<Stream*>(stream)->Do(std::move(work));
  } else {
    work();
  }
  return 0;
}

int Synchronize(void* stream) {
  if (stream == nullptr) return Captures().empty() ? 0 : kCaptureImplicit;
  if (const auto capture = static_cast<Stream*>(stream)->capture(); capture != nullptr) {
    return capture->invalidated = true, kCaptureUnsupported;
  }
  static_cast<Stream*>(stream)->Synchronize();
  return 0;
}

int SynchronizeAll() {
  if (const auto captures = Captures(); !captures.empty()) {
    for (const auto& capture : captures) capture->invalidated = true;
    return kCaptureUnsupported;
  }
  std::lock_guard lock(streams_mu);
  for (Stream* const stream : streams) stream->Synchronize();
  return 0;
}

int RecordEvent(Event* event, void* stream) {
  const auto record = std::make_shared<Record>();
  if (stream != nullptr) record->capture = static_cast<Stream*>(stream)->capture();
  event->latest = record;
  return Issue(stream, [=] {
    record->reached_at = std::chrono::steady_clock::now();
    record->reached.store(true, std::memory_order_release);
  });
}

int WaitForEvent(void* stream, const Event& event) {
  const std::shared_ptr<Record> record = event.latest;
  if (record == nullptr) return 0;
  const auto capture = stream == nullptr ? nullptr : static_cast<Stream*>(stream)->capture();
  if (record->capture != nullptr) {
    if (stream == nullptr) return kCaptureImplicit;
    if (capture == nullptr) static_cast<Stream*>(stream)->Capture(record->capture);
    return 0;
  }
  if (capture != nullptr) return capture->invalidated = true, kCaptureIsolation;  // it happened outside
  return Issue(stream, [=] { record->Await(); });
}

int IsCapturing(void* stream, int* status) {
  *status = 0;
  if (stream == nullptr) return Captures().empty() ? 0 : kCaptureImplicit;
  const auto capture = static_cast<Stream*>(stream)->capture();
  *status = capture == nullptr ? 0 : capture->invalidated ? 2 : 1;
  return 0;
}

int BeginCapture(void* stream, CaptureMode mode) {
  if (stream == nullptr) return kCaptureUnsupported;
  const auto capture = std::make_shared<CaptureState>(mode, std::this_thread::get_id());
  return static_cast<Stream*>(stream)->Capture(capture), 0;
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
