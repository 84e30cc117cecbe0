#include "server/simulator/simulated_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::simulator {

using kernels::CudaStatus;
using kernels::CudaStream;
using namespace cuda_results;

namespace {

// A GPU whose memory is nowhere, with copies as they are told to be. What is not in its table is not called.
class ProcessWithoutMemory final : public Process {
 public:
  ProcessWithoutMemory(Clock* clock, SimulatedCuda::Copier copier) : Process(clock), copier_(std::move(copier)) {}

  const kernels::CudaDriver& driver() const override {
    static const kernels::CudaDriver table = [] {
      kernels::CudaDriver d{};
      AddCommonFunctions(&d);
      d.DeviceGet = [](kernels::CudaDevice* device, int ordinal) { return *device = ordinal, kOk; };
      d.DeviceGetName = [](char* name, int bytes, kernels::CudaDevice) {
        return std::snprintf(name, static_cast<size_t>(bytes), "simulated GPU"), kOk;
      };
      d.DeviceGetUuid = [](kernels::CudaUuid* uuid, kernels::CudaDevice) { return *uuid = {}, kOk; };
      d.DeviceGetAttribute = [](int* value, int, kernels::CudaDevice) { return *value = 0, kOk; };
      d.MemHostRegister = [](void*, size_t, unsigned) { return kOk; };
      d.MemHostUnregister = [](void*) { return kOk; };
      d.MemHostAlloc = [](void** data, size_t bytes, unsigned) { return *data = std::calloc(1, bytes), kOk; };
      d.MemFreeHost = [](void* data) { return std::free(data), kOk; };
      return d;
    }();
    return table;
  }

  int Copy(const GpuCopy& copy, CudaStream stream) override {
    return Issue(stream, [this, copy](std::function<void()> done) { copier_(copy, std::move(done)); });
  }

 private:
  const SimulatedCuda::Copier copier_;
};

}  // namespace

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

  void WaitEmpty() override {
    SUPEROFFLOAD_CHECK(cuda_->killed_ || items_->queue.empty(), "nobody waits in virtual time");
  }

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

SimulatedCuda::SimulatedCuda(VirtualTime* time, Copier copier, After after)
    : SimulatedCuda(
          time, [&copier](Clock* clock) { return std::make_unique<ProcessWithoutMemory>(clock, std::move(copier)); },
          std::move(after)) {}

SimulatedCuda::SimulatedCuda(VirtualTime* time, const MakeProcess& make_process, After after)
    : time_(time), after_(std::move(after)), process_(make_process(this)) {
  const InProcess opening(process_.get());
  const CudaStatus status = kernels::GpuDevice::OpenWith(process_->driver(), 0, &device_);
  SUPEROFFLOAD_CHECK(status.ok(), status.message);
}

SimulatedCuda::~SimulatedCuda() {
  const InProcess closing(process_.get());
  device_.reset();
  SUPEROFFLOAD_CHECK_EQ(process_->objects(), 0, "something of the simulated driver is left");
}

std::unique_ptr<kernels::CompletionQueue> SimulatedCuda::MakeQueue() { return std::make_unique<Queue>(this); }

GpuStream& SimulatedCuda::StreamOf(CudaStream handle) {
  const std::shared_ptr<Stream> stream = FindStream(handle);
  SUPEROFFLOAD_CHECK(stream != nullptr, "a stream that is destroyed is used");
  return static_cast<GpuStream&>(*stream);
}

std::shared_ptr<Stream> SimulatedCuda::MakeStream() {
  return streams_.emplace_back(std::make_shared<GpuStream>(time_, nullptr));
}

int SimulatedCuda::DoNow(const Stream::Operation&) { return kInvalidHandle; }

void SimulatedCuda::Await(const EventRecord& record) {
  SUPEROFFLOAD_CHECK(record.reached(), "nobody waits in virtual time");
}

bool SimulatedCuda::idle() const {
  return callbacks_ == 0 &&
         std::all_of(streams_.begin(), streams_.end(), [](const auto& stream) { return stream->idle(); });
}

void SimulatedCuda::Kill() {
  killed_ = true;
  for (const auto& stream : streams_) stream->Abort();
}

}  // namespace superoffload::simulator
