#include "server/simulator/driver/driver.h"

#include <set>
#include <utility>
#include <vector>

#include "server/simulator/driver/handles.h"

namespace superoffload::simulator {

using kernels::CudaEvent;
using kernels::CudaPointer;
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
Handles<OwnedStream>& Streams() { return Handles<OwnedStream>::Get(); }
Handles<OwnedEvent>& Events() { return Handles<OwnedEvent>::Get(); }

thread_local CaptureMode capture_mode = CaptureMode::kGlobal;

// Those under way, of any stream.
std::set<std::shared_ptr<Capture>> Captures() {
  std::set<std::shared_ptr<Capture>> captures;
  for (const std::shared_ptr<OwnedStream>& owned : Streams().All()) {
    if (auto capture = owned->stream->capture(); capture != nullptr) captures.insert(std::move(capture));
  }
  return captures;
}

int Invalidate(Capture* capture, int result) { return capture->invalidated = true, result; }

}  // namespace

int CheckSafe() {
  if (capture_mode == CaptureMode::kRelaxed) return kOk;
  int result = kOk;
  for (const auto& capture : Captures()) {
    const bool own = capture->thread == std::this_thread::get_id() && capture->mode != CaptureMode::kRelaxed;
    const bool global = capture_mode == CaptureMode::kGlobal && capture->mode == CaptureMode::kGlobal;
    if (own || global) result = Invalidate(capture.get(), kCaptureUnsupported);
  }
  return result;
}

std::shared_ptr<Stream> FindStream(CudaStream handle) {
  const std::shared_ptr<OwnedStream> found = Streams().Find(handle);
  return found == nullptr ? nullptr : found->stream;
}

std::shared_ptr<void> Lend(Stream* stream, CudaStream* handle) {
  const auto nobody = [](Stream*) {};
  *handle = Streams().Add<CudaStream>(
      std::make_shared<OwnedStream>(OwnedStream{std::shared_ptr<Stream>(stream, nobody), nullptr}));
  return {*handle, [](CudaStream lent) { Streams().Take(lent); }};
}

int Issue(CudaStream handle, Stream::Operation operation) {
  if (handle == nullptr) {
    Process* process;
    const int result = FindProcess(Needs::kContext, &process);
    return result != 0 ? result : process->clock().DoNow(operation);
  }
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->Do(std::move(operation)), kOk;
}

int Synchronize(CudaStream handle) {
  if (handle == nullptr) return Captures().empty() ? kOk : kCaptureImplicit;
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (const auto capture = stream->capture(); capture != nullptr) return Invalidate(capture.get(), kCaptureUnsupported);
  return stream->Synchronize(), kOk;
}

int SynchronizeContext() {
  Process* process;
  if (const int result = FindProcess(Needs::kContext, &process); result != 0) return result;
  int result = kOk;
  for (const auto& capture : Captures()) result = Invalidate(capture.get(), kCaptureUnsupported);
  for (const auto& owned : Streams().All()) {
    if (result == kOk && owned->process == process) owned->stream->Synchronize();
  }
  return result;
}

int BeginCapture(CudaStream handle, CaptureMode mode) {
  if (handle == nullptr) return kCaptureUnsupported;
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->SetCapture(std::make_shared<Capture>(mode)), kOk;
}

int EndCapture(CudaStream handle) {
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::shared_ptr<Capture> capture = stream->SetCapture(nullptr);
  return capture != nullptr && capture->invalidated ? kCaptureInvalidated : kOk;
}

namespace {

int CreateStream(Process& process, CudaStream* handle, unsigned) {
  process.CountObject(1);
  *handle =
      Streams().Add<CudaStream>(std::make_shared<OwnedStream>(OwnedStream{process.clock().MakeStream(), &process}));
  return kOk;
}
int DestroyStream(CudaStream handle) {
  const std::shared_ptr<OwnedStream> owned = Streams().Take(handle);
  if (owned == nullptr) return kInvalidHandle;
  owned->stream->SetCapture(nullptr);
  owned->stream->Synchronize();
  if (owned->process != nullptr) owned->process->CountObject(-1);
  return kOk;
}
int SynchronizeStream(Process&, CudaStream handle) { return Synchronize(handle); }
int IsCapturing(Process&, CudaStream handle, int* status) {
  *status = kernels::kCudaStreamNotCapturing;
  if (handle == nullptr) return Captures().empty() ? kOk : kCaptureImplicit;
  const std::shared_ptr<Stream> stream = FindStream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (const auto capture = stream->capture(); capture != nullptr) *status = capture->invalidated ? 2 : 1;
  return kOk;
}
int ExchangeCaptureMode(int* mode) {
  *mode = static_cast<int>(std::exchange(capture_mode, static_cast<CaptureMode>(*mode)));
  return kOk;
}

int CreateEvent(Process& process, CudaEvent* handle, unsigned) {
  process.CountObject(1);
  return *handle = Events().Add<CudaEvent>(std::make_shared<OwnedEvent>(OwnedEvent{GpuEvent(), &process})), kOk;
}
int DestroyEvent(CudaEvent handle) {
  const std::shared_ptr<OwnedEvent> owned = Events().Take(handle);
  if (owned == nullptr) return kInvalidHandle;
  return owned->process->CountObject(-1), kOk;
}
int RecordEvent(Process& process, CudaEvent handle, CudaStream stream_handle) {
  const std::shared_ptr<OwnedEvent> owned = Events().Find(handle);
  const std::shared_ptr<Stream> stream = FindStream(stream_handle);
  if (owned == nullptr || (stream_handle != nullptr && stream == nullptr)) return kInvalidHandle;
  if (stream != nullptr) return stream->Record(&owned->event), kOk;
  const auto record = owned->event.latest = std::make_shared<EventRecord>(nullptr);
  return process.clock().DoNow([&](const std::function<void()>& done) {
    record->Reach(process.clock().Now());
    done();
  });
}
int WaitEvent(Process&, CudaStream stream_handle, CudaEvent handle, unsigned) {
  const std::shared_ptr<Stream> stream = FindStream(stream_handle);
  const std::shared_ptr<OwnedEvent> owned = Events().Find(handle);
  if (owned == nullptr || (stream_handle != nullptr && stream == nullptr)) return kInvalidHandle;
  const std::shared_ptr<EventRecord> record = owned->event.latest;
  if (record == nullptr) return stream == nullptr ? kOk : (stream->Wait(owned->event), kOk);  // passes in its turn
  const auto capture = stream == nullptr ? nullptr : stream->capture();
  if (record->capture != nullptr) {
    if (stream == nullptr) return kCaptureImplicit;
    if (capture == nullptr) stream->SetCapture(record->capture);
    return kOk;
  }
  if (capture != nullptr) return Invalidate(capture.get(), kCaptureIsolation);  // it happened outside
  return Issue(stream_handle, [record](std::function<void()> done) { record->Then(std::move(done)); });
}

// Whoever waits for an event or asks for it needs no context. Whether the record has been reached, or there is none.
int Await(CudaEvent handle, bool waits) {
  if (const int result = CheckSafe(); result != 0) return result;
  const std::shared_ptr<OwnedEvent> owned = Events().Find(handle);
  if (owned == nullptr) return kInvalidHandle;
  const std::shared_ptr<EventRecord> record = owned->event.latest;
  if (record != nullptr && record->capture != nullptr) return kCapturedEvent;
  const Process& process = *owned->process;
  if (waits && record != nullptr && process.fault() == kOk) process.clock().Await(*record);
  if (process.fault() != kOk) return process.fault();
  return record == nullptr || record->reached() ? kOk : kernels::kCudaNotReady;
}
int QueryEvent(CudaEvent handle) { return Await(handle, false); }
int SynchronizeEvent(CudaEvent handle) { return Await(handle, true); }
int GetElapsedTime(float* milliseconds, CudaEvent begin, CudaEvent end) {
  const std::shared_ptr<OwnedEvent> first = Events().Find(begin), last = Events().Find(end);
  if (first == nullptr || last == nullptr) return kInvalidHandle;
  const std::shared_ptr<EventRecord> from = first->event.latest, to = last->event.latest;
  if (from == nullptr || to == nullptr) return kInvalidHandle;
  if (!from->reached() || !to->reached()) return kernels::kCudaNotReady;
  return *milliseconds = static_cast<float>((to->reached_at() - from->reached_at()) * 1e3), kOk;
}
int CopyUp(Process& process, CudaPointer to, const void* from, size_t bytes, CudaStream stream) {
  return process.Copy({true, to, const_cast<std::byte*>(static_cast<const std::byte*>(from)), bytes}, stream);
}
int CopyDown(Process& process, void* to, CudaPointer from, size_t bytes, CudaStream stream) {
  return process.Copy({false, from, static_cast<std::byte*>(to), bytes}, stream);
}
int GetErrorString(int result, const char** text) {
  return *text = result == kOutOfMemory ? "out of memory" : "an error", kOk;
}

}  // namespace

void AddCommonFunctions(kernels::CudaDriver* d) {
  AddContextFunctions(d);
  d->StreamCreate = &Call<Needs::kContext, &CreateStream>;
  d->StreamDestroy = &DestroyStream;
  d->StreamSynchronize = &Call<Needs::kContextAndSafe, &SynchronizeStream>;
  d->StreamWaitEvent = &Call<Needs::kContext, &WaitEvent>;
  d->StreamIsCapturing = &Call<Needs::kContext, &IsCapturing>;
  d->ThreadExchangeStreamCaptureMode = &ExchangeCaptureMode;
  d->EventCreate = &Call<Needs::kContext, &CreateEvent>;
  d->EventDestroy = &DestroyEvent;
  d->EventRecord = &Call<Needs::kContext, &RecordEvent>;
  d->EventQuery = &QueryEvent;
  d->EventSynchronize = &SynchronizeEvent;
  d->EventElapsedTime = &GetElapsedTime;
  d->MemcpyHtoDAsync = &Call<Needs::kContext, &CopyUp>;
  d->MemcpyDtoHAsync = &Call<Needs::kContext, &CopyDown>;
  d->GetErrorString = &GetErrorString;
}

}  // namespace superoffload::simulator
