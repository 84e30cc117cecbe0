// Contexts are simulations: who makes a stream makes it in the one that is current, as with the real driver.
#include "server/simulator/simulated_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/check.h"

namespace superoffload::simulator {

using kernels::CudaContext;
using kernels::CudaEvent;
using kernels::CudaPointer;
using kernels::CudaStatus;
using kernels::CudaStream;

namespace {

constexpr int kOk = 0, kOutOfMemory = 2, kInvalidContext = 201;

// The simulation that is being made, then those that are current, the latest last.
thread_local SimulatedCuda* made = nullptr;
thread_local std::vector<SimulatedCuda*> current;

GpuEvent& EventOf(CudaEvent event) { return *reinterpret_cast<GpuEvent*>(event); }

}  // namespace

// The functions; what is not here is not called.
struct SimulatedDriver {
  static int GetName(char* name, int bytes, kernels::CudaDevice) {
    std::snprintf(name, static_cast<size_t>(bytes), "simulated GPU");
    return kOk;
  }
  static int GetAttribute(int* value, int, kernels::CudaDevice) { return *value = 0, kOk; }
  static int GetUuid(kernels::CudaUuid* uuid, kernels::CudaDevice) { return *uuid = {}, kOk; }
  static int Get(kernels::CudaDevice* device, int ordinal) { return *device = ordinal, kOk; }
  static int Retain(CudaContext* context, kernels::CudaDevice) {
    *context = reinterpret_cast<CudaContext>(made);
    return kOk;
  }
  static int Release(kernels::CudaDevice) { return kOk; }
  static int Push(CudaContext context) {
    current.push_back(reinterpret_cast<SimulatedCuda*>(context));
    return kOk;
  }
  static int Pop(CudaContext* context) {
    if (current.empty()) return kInvalidContext;
    *context = reinterpret_cast<CudaContext>(current.back());
    current.pop_back();
    return kOk;
  }
  static int HostAlloc(void** data, size_t bytes, unsigned) { return *data = std::calloc(1, bytes), kOk; }
  static int FreeHost(void* data) { return std::free(data), kOk; }
  static int HostRegister(void*, size_t, unsigned) { return kOk; }
  static int HostUnregister(void*) { return kOk; }
  static int ToGpu(CudaPointer to, const void* from, size_t bytes, CudaStream stream) {
    return Copy({true, to, const_cast<std::byte*>(static_cast<const std::byte*>(from)), bytes}, stream);
  }
  static int ToHost(void* to, CudaPointer from, size_t bytes, CudaStream stream) {
    return Copy({false, from, static_cast<std::byte*>(to), bytes}, stream);
  }
  static int Copy(const SimulatedCuda::Copy& copy, CudaStream stream) {
    if (current.empty()) return kInvalidContext;
    SimulatedCuda* const cuda = current.back();
    SimulatedCuda::StreamOf(stream).Do(
        [cuda, copy](std::function<void()> done) { cuda->copier_(copy, std::move(done)); });
    return kOk;
  }
  static int OnGpu(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream) {
    return Run([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); }, stream);
  }
  static int Run(std::function<void()> work, CudaStream stream) {
    if (current.empty()) return kInvalidContext;
    SimulatedCuda::StreamOf(stream).Do([cuda = current.back(), work = std::move(work)](std::function<void()> done) {
      cuda->kernels_.run(work, std::move(done));
    });
    return kOk;
  }
  // Functions are their names; images are not looked at.
  static int LoadModule(kernels::CudaModule* module, const void*) { return *module = nullptr, kOk; }
  static int UnloadModule(kernels::CudaModule) { return kOk; }
  static int GetFunction(kernels::CudaFunction* function, kernels::CudaModule, const char* name) {
    static std::set<std::string>* const names = new std::set<std::string>;
    *function = reinterpret_cast<kernels::CudaFunction>(const_cast<std::string*>(&*names->insert(name).first));
    return kOk;
  }
  static int SetFunctionAttribute(kernels::CudaFunction, int, int) { return kOk; }
  static int Launch(kernels::CudaFunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    unsigned, CudaStream stream, void** arguments, void**) {
    if (current.empty()) return kInvalidContext;
    const auto& name = *reinterpret_cast<const std::string*>(function);
    return Run(current.back()->kernels_.bind(name, arguments), stream);
  }
  static int Allocate(CudaPointer* pointer, size_t bytes) {
    if (current.empty()) return kInvalidContext;
    if (!current.back()->kernels_.has_memory(bytes)) return kOutOfMemory;
    auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    *pointer = reinterpret_cast<CudaPointer>(memory.get());
    current.back()->allocated_[*pointer] = std::move(memory);
    return kOk;
  }
  static int Free(CudaPointer pointer) {
    if (current.empty()) return kInvalidContext;
    SUPEROFFLOAD_CHECK_EQ(current.back()->allocated_.erase(pointer), 1u);
    return kOk;
  }
  static int ExchangeCaptureMode(int*) { return kOk; }
  static int IsCapturing(CudaStream, int* status) { return *status = kernels::kCudaStreamNotCapturing, kOk; }
  static int CreateStream(CudaStream* stream, unsigned) {
    if (current.empty()) return kInvalidContext;
    SimulatedCuda* const cuda = current.back();
    *stream = SimulatedCuda::HandleOf(&cuda->streams_.emplace_back(cuda->time_, nullptr));
    return kOk;
  }
  // They stay until the simulation ends: an event may still be on its way to one that was killed.
  static int DestroyStream(CudaStream stream) { return SynchronizeStream(stream); }
  static int SynchronizeStream(CudaStream stream) {
    SimulatedCuda::StreamOf(stream).Flush();
    SUPEROFFLOAD_CHECK(SimulatedCuda::StreamOf(stream).idle(), "nobody waits in virtual time");
    return kOk;
  }
  static int WaitEvent(CudaStream stream, CudaEvent event, unsigned) {
    SimulatedCuda::StreamOf(stream).Wait(EventOf(event));
    return kOk;
  }
  static int CreateEvent(CudaEvent* event, unsigned) {
    *event = reinterpret_cast<CudaEvent>(new GpuEvent);
    return kOk;
  }
  static int DestroyEvent(CudaEvent event) { return delete &EventOf(event), kOk; }
  static int RecordEvent(CudaEvent event, CudaStream stream) {
    SimulatedCuda::StreamOf(stream).Record(&EventOf(event));
    return kOk;
  }
  static int GetErrorString(int, const char** text) { return *text = "the context is invalid", kOk; }

  static const kernels::CudaDriver& Table() {
    static const kernels::CudaDriver table = [] {
      kernels::CudaDriver d{};
      d.DeviceGet = &Get;
      d.DeviceGetName = &GetName;
      d.DeviceGetAttribute = &GetAttribute;
      d.DeviceGetUuid = &GetUuid;
      d.DevicePrimaryCtxRetain = &Retain;
      d.DevicePrimaryCtxRelease = &Release;
      d.CtxPushCurrent = &Push;
      d.CtxPopCurrent = &Pop;
      d.MemHostAlloc = &HostAlloc;
      d.MemFreeHost = &FreeHost;
      d.MemHostRegister = &HostRegister;
      d.MemHostUnregister = &HostUnregister;
      d.MemcpyHtoDAsync = &ToGpu;
      d.MemcpyDtoHAsync = &ToHost;
      d.MemcpyDtoDAsync = &OnGpu;
      d.ModuleLoadData = &LoadModule;
      d.ModuleUnload = &UnloadModule;
      d.ModuleGetFunction = &GetFunction;
      d.FuncSetAttribute = &SetFunctionAttribute;
      d.LaunchKernel = &Launch;
      d.MemAlloc = &Allocate;
      d.MemFree = &Free;
      d.ThreadExchangeStreamCaptureMode = &ExchangeCaptureMode;
      d.StreamIsCapturing = &IsCapturing;
      d.StreamCreate = &CreateStream;
      d.StreamDestroy = &DestroyStream;
      d.StreamSynchronize = &SynchronizeStream;
      d.StreamWaitEvent = &WaitEvent;
      d.EventCreate = &CreateEvent;
      d.EventDestroy = &DestroyEvent;
      d.EventRecord = &RecordEvent;
      d.GetErrorString = &GetErrorString;
      return d;
    }();
    return table;
  }
};

// Its callbacks are events of their own, as a thread's are.
class SimulatedCuda::Queue final : public kernels::CompletionQueue {
 public:
  explicit Queue(SimulatedCuda* cuda) : cuda_(cuda), items_(std::make_shared<Items>()) {}
  ~Queue() override {
    WaitEmpty();
    items_->ended = true;
  }

  CudaStatus After(CudaStream stream, Callback callback) override {
    Push(std::move(callback), false);
    // A deque's elements stay where they are while its ends change.
    StreamOf(stream).HostCall([cuda = cuda_, items = items_, item = &items_->queue.back()] {
      if (items->ended) return;
      item->ready = true;
      Wake(cuda, items);
    });
    return {};
  }

  void Then(Callback callback) override {
    Push(std::move(callback), true);
    Wake(cuda_, items_);
  }

  void WaitEmpty() override { SUPEROFFLOAD_CHECK(cuda_->killed_ || items_->queue.empty(), "nobody waits in virtual time"); }

 private:
  struct Item {
    Callback callback;
    bool ready;
  };
  struct Items {  // shared with what is on its way
    std::deque<Item> queue;
    bool waking = false;
    bool ended = false;
  };

  void Push(Callback callback, bool ready) {
    items_->queue.push_back({std::move(callback), ready});
    ++cuda_->callbacks_;
  }

  static void Wake(SimulatedCuda* cuda, const std::shared_ptr<Items>& items) {
    if (items->waking || !items->queue.front().ready) return;
    items->waking = true;
    cuda->after_([cuda, items] { RunFirst(cuda, items); });
  }

  static void RunFirst(SimulatedCuda* cuda, const std::shared_ptr<Items>& items) {
    items->waking = false;
    if (items->ended || cuda->killed_) return;
    const kernels::CurrentDevice device(*cuda->device_);
    const Callback callback = std::move(items->queue.front().callback);
    items->waking = true;  // the next one does not run inside of this one
    callback({});
    --cuda->callbacks_;
    items->waking = false;
    if (items->ended) return;
    items->queue.pop_front();
    if (!items->queue.empty()) Wake(cuda, items);
  }

  SimulatedCuda* const cuda_;
  const std::shared_ptr<Items> items_;
};

SimulatedCuda::SimulatedCuda(VirtualTime* time, Copier copier, std::function<void(std::function<void()>)> after,
                             Kernels kernels)
    : time_(time), copier_(std::move(copier)), after_(std::move(after)), kernels_(std::move(kernels)) {
  made = this;
  const CudaStatus status = kernels::GpuDevice::OpenWith(SimulatedDriver::Table(), 0, &device_);
  made = nullptr;
  SUPEROFFLOAD_CHECK(status.ok(), status.message);
}

SimulatedCuda::~SimulatedCuda() { SUPEROFFLOAD_CHECK(allocated_.empty(), "GPU memory is left"); }

std::unique_ptr<kernels::CompletionQueue> SimulatedCuda::MakeQueue() { return std::make_unique<Queue>(this); }

GpuStream& SimulatedCuda::StreamOf(CudaStream stream) { return *reinterpret_cast<GpuStream*>(stream); }
CudaStream SimulatedCuda::HandleOf(GpuStream* stream) { return reinterpret_cast<CudaStream>(stream); }

bool SimulatedCuda::idle() const {
  return callbacks_ == 0 &&
         std::all_of(streams_.begin(), streams_.end(), [](const GpuStream& stream) { return stream.idle(); });
}

void SimulatedCuda::Kill() {
  killed_ = true;
  for (GpuStream& stream : streams_) stream.Abort();
}

}  // namespace superoffload::simulator
