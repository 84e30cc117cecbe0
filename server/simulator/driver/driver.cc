#include "server/simulator/driver/driver.h"

#include <set>
#include <utility>
#include <vector>

#include "server/simulator/driver/handles.h"
#include "server/simulator/driver/results.h"

namespace superoffload::simulator {

using kernels::CudaEvent;
using kernels::CudaStream;
using namespace cuda_results;

namespace {

struct OwnedStream {
  std::shared_ptr<Stream> stream;
  Process* process;  // null: lent
};
struct OwnedEvent {
  GpuEvent event;
  Process* process;
};

// Never destroyed: streams that are left run until the program ends.
Handles<OwnedStream>& Streams() {
  static auto* const streams = new Handles<OwnedStream>(0x5f0000000000);
  return *streams;
}
Handles<OwnedEvent>& Events() {
  static auto* const events = new Handles<OwnedEvent>(0x5d0000000000);
  return *events;
}

thread_local CaptureMode capture_mode = CaptureMode::kGlobal;

// Those under way, of any stream.
std::set<std::shared_ptr<Capture>> Captures() {
  std::set<std::shared_ptr<Capture>> captures;
  for (const std::shared_ptr<OwnedStream>& owned : Streams().All()) {
    if (auto capture = owned->stream->capture(); capture != nullptr) captures.insert(std::move(capture));
  }
  return captures;
}

}  // namespace

int FindCurrentAndSafe(Process** process) {
  const int result = FindCurrent(process);
  return result != 0 ? result : CheckSafe();
}

int CheckSafe() {
  if (capture_mode == CaptureMode::kRelaxed) return kOk;
  int result = kOk;
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

std::shared_ptr<Stream> FindStream(CudaStream handle) {
  const std::shared_ptr<OwnedStream> found = Streams().Find(handle);
  return found == nullptr ? nullptr : found->stream;
}

std::shared_ptr<void> Lend(Stream* stream, CudaStream* handle) {
  const auto nobody = [](Stream*) {};
  void* const made = Streams().Add(std::make_shared<OwnedStream>(std::shared_ptr<Stream>(stream, nobody), nullptr));
  *handle = reinterpret_cast<CudaStream>(made);
  return {made, [](void* lent) { Streams().Take(lent); }};
}

int Issue(CudaStream handle, Stream::Operation operation) {
  if (handle == nullptr) {
    Process* process;
    const int result = FindCurrent(&process);
    if (process == nullptr) return result;
    return process->clock().DoNow(operation);
  }
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->Do(std::move(operation)), kOk;
}

int Synchronize(CudaStream handle) {
  if (handle == nullptr) return Captures().empty() ? kOk : kCaptureImplicit;
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (const auto capture = stream->capture(); capture != nullptr) {
    return capture->invalidated = true, kCaptureUnsupported;
  }
  return stream->Synchronize(), kOk;
}

int SynchronizeContext() {
  Process* process;
  if (const int result = FindCurrent(&process); result != 0) return result;
  if (const auto captures = Captures(); !captures.empty()) {
    for (const auto& capture : captures) capture->invalidated = true;
    return kCaptureUnsupported;
  }
  for (const auto& owned : Streams().All()) {
    if (owned->process == process) owned->stream->Synchronize();
  }
  return kOk;
}

int BeginCapture(CudaStream handle, CaptureMode mode) {
  if (handle == nullptr) return kCaptureUnsupported;
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->Join(std::make_shared<Capture>(mode, std::this_thread::get_id())), kOk;
}

int EndCapture(CudaStream handle) {
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::shared_ptr<Capture> capture = stream->EndCapture();
  return capture != nullptr && capture->invalidated ? kCaptureInvalidated : kOk;
}

namespace {

int CreateStream(CudaStream* handle, unsigned) {
  Process* process;
  if (const int result = FindCurrent(&process); result != 0) return result;
  process->CountObject(1);
  const auto owned = std::make_shared<OwnedStream>(process->clock().MakeStream(), process);
  return *handle = reinterpret_cast<CudaStream>(Streams().Add(owned)), kOk;
}
int DestroyStream(CudaStream handle) {
  const std::shared_ptr<OwnedStream> owned = Streams().Take(handle);
  if (owned == nullptr) return kInvalidHandle;
  owned->stream->EndCapture();
  owned->stream->Synchronize();
  if (owned->process != nullptr) owned->process->CountObject(-1);
  return kOk;
}
int SynchronizeStream(CudaStream handle) {
  Process* process;
  const int result = FindCurrentAndSafe(&process);
  return result != 0 ? result : Synchronize(handle);
}
int IsCapturing(CudaStream handle, int* status) {
  *status = kernels::kCudaStreamNotCapturing;
  Process* process;
  if (const int result = FindCurrent(&process); result != 0) return result;
  if (handle == nullptr) return Captures().empty() ? kOk : kCaptureImplicit;
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  const auto capture = stream->capture();
  return *status = capture == nullptr ? kernels::kCudaStreamNotCapturing : capture->invalidated ? 2 : 1, kOk;
}
int ExchangeCaptureMode(int* mode) {
  *mode = static_cast<int>(std::exchange(capture_mode, static_cast<CaptureMode>(*mode)));
  return kOk;
}

int CreateEvent(CudaEvent* handle, unsigned) {
  Process* process;
  if (const int result = FindCurrent(&process); result != 0) return result;
  process->CountObject(1);
  const auto owned = std::make_shared<OwnedEvent>(GpuEvent(), process);
  return *handle = reinterpret_cast<CudaEvent>(Events().Add(owned)), kOk;
}
int DestroyEvent(CudaEvent handle) {
  const std::shared_ptr<OwnedEvent> owned = Events().Take(handle);
  if (owned == nullptr) return kInvalidHandle;
  return owned->process->CountObject(-1), kOk;
}
int RecordEvent(CudaEvent handle, CudaStream stream_handle) {
  Process* process;
  if (const int result = FindCurrent(&process); result != 0) return result;
  const std::shared_ptr<OwnedEvent> owned = Events().Find(handle);
  if (owned == nullptr) return kInvalidHandle;
  if (stream_handle == nullptr) {
    const auto record = std::make_shared<EventRecord>(nullptr);
    owned->event.SetLatest(record);
    return Issue(nullptr, [=](const std::function<void()>& done) {
      record->Reach(process->clock().Now());
      done();
    });
  }
  const std::shared_ptr<Stream> stream = FindStream(stream_handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->Record(&owned->event), kOk;
}
int WaitEvent(CudaStream stream_handle, CudaEvent handle, unsigned) {
  Process* process;
  if (const int result = FindCurrent(&process); result != 0) return result;
  const std::shared_ptr<Stream> stream = FindStream(stream_handle);
  const std::shared_ptr<OwnedEvent> owned = Events().Find(handle);
  if (owned == nullptr || (stream_handle != nullptr && stream == nullptr)) return kInvalidHandle;
  const std::shared_ptr<EventRecord> record = owned->event.latest();
  if (record == nullptr) return stream == nullptr ? kOk : (stream->Wait(owned->event), kOk);  // passes in its turn
  const auto capture = stream == nullptr ? nullptr : stream->capture();
  if (record->capture != nullptr) {
    if (stream == nullptr) return kCaptureImplicit;
    if (capture == nullptr) stream->Join(record->capture);
    return kOk;
  }
  if (capture != nullptr) return capture->invalidated = true, kCaptureIsolation;  // it happened outside
  return Issue(stream_handle, [record](std::function<void()> done) { record->Then(std::move(done)); });
}

// Of an event whose caller waits or asks; no record: it was never recorded.
int FindRecord(CudaEvent handle, std::shared_ptr<EventRecord>* record, Process** process) {
  if (const int result = CheckSafe(); result != 0) return result;
  const std::shared_ptr<OwnedEvent> owned = Events().Find(handle);
  if (owned == nullptr) return kInvalidHandle;
  *process = owned->process;
  *record = owned->event.latest();
  if (*record != nullptr && (*record)->capture != nullptr) return kCapturedEvent;
  return owned->process->fault();
}
int QueryEvent(CudaEvent handle) {
  std::shared_ptr<EventRecord> record;
  Process* process;
  if (const int result = FindRecord(handle, &record, &process); result != 0) return result;
  return record == nullptr || record->reached() ? kOk : kernels::kCudaNotReady;
}
int SynchronizeEvent(CudaEvent handle) {
  std::shared_ptr<EventRecord> record;
  Process* process;
  if (const int result = FindRecord(handle, &record, &process); result != 0 || record == nullptr) return result;
  return process->clock().Await(*record), process->fault();
}
int GetElapsedTime(float* milliseconds, CudaEvent begin, CudaEvent end) {
  const std::shared_ptr<OwnedEvent> first = Events().Find(begin), last = Events().Find(end);
  if (first == nullptr || last == nullptr) return kInvalidHandle;
  if (first->event.latest() == nullptr || last->event.latest() == nullptr) return kInvalidHandle;
  if (!first->event.complete() || !last->event.complete()) return kernels::kCudaNotReady;
  const double seconds = last->event.latest()->reached_at() - first->event.latest()->reached_at();
  return *milliseconds = static_cast<float>(seconds * 1e3), kOk;
}
int GetErrorString(int result, const char** text) {
  return *text = result == kOutOfMemory ? "out of memory" : "an error", kOk;
}

}  // namespace

void AddCommonFunctions(kernels::CudaDriver* d) {
  AddContextFunctions(d);
  d->StreamCreate = &CreateStream;
  d->StreamDestroy = &DestroyStream;
  d->StreamSynchronize = &SynchronizeStream;
  d->StreamWaitEvent = &WaitEvent;
  d->StreamIsCapturing = &IsCapturing;
  d->ThreadExchangeStreamCaptureMode = &ExchangeCaptureMode;
  d->EventCreate = &CreateEvent;
  d->EventDestroy = &DestroyEvent;
  d->EventRecord = &RecordEvent;
  d->EventQuery = &QueryEvent;
  d->EventSynchronize = &SynchronizeEvent;
  d->EventElapsedTime = &GetElapsedTime;
  d->GetErrorString = &GetErrorString;
}

}  // namespace superoffload::simulator
