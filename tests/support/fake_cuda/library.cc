// A libcuda.so.1 for machines without a GPU: it covers everything up to the driver's calls, and says nothing about a
// GPU. It is process.h's under the wall clock, and what goes wrong elsewhere goes wrong here when told to (machine.h).
//
// Each stream is a thread that runs its work in order, each piece late at random: so whoever forgets a wait gets wrong
// bits, the surer the longer the streams dawdle. The default stream is the calling thread itself, as if the host
// computed what a trainer's GPU does. Copies outlive their process (outlive.h).
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/support/fake_cuda/launch.h"
#include "tests/support/fake_cuda/outlive.h"

namespace fake = superoffload::fake_cuda;
namespace simulator = superoffload::simulator;
using superoffload::kernels::CudaDriver;
using superoffload::kernels::CudaFunction;
using superoffload::kernels::CudaPointer;
using superoffload::kernels::CudaStream;

namespace {

double SecondsNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class ThreadStream final : public simulator::Stream {
 public:
  ~ThreadStream() override {
    SetCapture(nullptr);
    AwaitIdle();
    Signal(&stop_);
    thread_.join();
  }

  void Synchronize() override { AwaitIdle(); }

 private:
  void Begin() override { Signal(&signalled_); }
  void Continue() override { Signal(&signalled_); }
  void Dawdle() override {
    if (delay_ > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<unsigned>(delay_)));
  }
  double Now() const override { return SecondsNow(); }

  void Signal(bool* what) {
    {
      std::lock_guard lock(mu_);
      *what = true;
    }
    changed_.notify_all();
  }
  void RunUntilStopped() {
    std::unique_lock lock(mu_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || signalled_; });
      if (!std::exchange(signalled_, false)) return;
      lock.unlock();
      Run();
      lock.lock();
    }
  }

  const int delay_ = fake::Setting("FAKE_CUDA_DELAY");
  std::minstd_rand random_{std::random_device{}()};
  std::mutex mu_;
  std::condition_variable changed_;
  bool signalled_ = false, stop_ = false;
  std::thread thread_{[this] { RunUntilStopped(); }};
};

class ThreadClock final : public simulator::Clock {
 public:
  std::shared_ptr<simulator::Stream> MakeStream() override { return std::make_shared<ThreadStream>(); }
  int DoNow(const simulator::Stream::Operation& operation) override {
    const auto is_done = std::make_shared<std::promise<void>>();
    operation([is_done] { is_done->set_value(); });
    return is_done->get_future().wait(), fake::kOk;
  }
  void Await(const simulator::EventRecord& record) override {
    while (!record.reached()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  double Now() const override { return SecondsNow(); }
};

class ThisProcess final : public fake::Process {
 public:
  using fake::Process::Process;

  bool has_threads() const override { return threads_; }

  void Move(const simulator::GpuCopy& copy, const std::function<void(size_t, size_t)>& move,
            const Done& done) override {
    const std::chrono::microseconds longer(fake::SettingOf("FAKE_CUDA_SLOW", copy.to_gpu ? "HtoD" : "DtoH"));
    std::shared_ptr<void> unfinished;
    if (!copy.to_gpu) {
      const void* const from = memory().OnGpu(reinterpret_cast<const void*>(copy.gpu), copy.bytes);
      unfinished = fake::Unfinished(copy.host, from, copy.bytes);
    }
    if (longer.count() > 0) std::this_thread::sleep_for(longer);
    move(0, copy.bytes);
    unfinished.reset();
    done();
  }

 private:
  // Without them kernels' bits are the same and come sooner: 32 threads to a block are made and joined each time.
  const bool threads_ = fake::Setting("FAKE_CUDA_NO_THREADS") == 0;
};

// Never destroyed: streams that are left run until the process ends.
ThisProcess& TheProcess() {
  static auto* const memory = new fake::Memory(fake::ThisMachine, fake::OutOfMemory);
  static auto* const process = new ThisProcess(new ThreadClock, memory);
  return *process;
}

std::mutex stall_mu;
std::condition_variable stall_changed;
std::string stalled_call;
int stalled_threads = 0;
std::atomic<bool> any_stalled = false;

void AwaitRelease(const char* call) {
  if (!any_stalled.load(std::memory_order_acquire)) return;
  std::unique_lock lock(stall_mu);
  if (stalled_call != call) return;
  ++stalled_threads;
  stall_changed.notify_all();
  stall_changed.wait(lock, [call] { return stalled_call != call; });
  --stalled_threads;
}

std::atomic<void (*)(uint64_t to, size_t bytes)> on_copy_to_gpu = nullptr;
std::atomic<void (*)(const char* name, unsigned blocks, unsigned shared_bytes)> on_launch = nullptr;

// A call that may be stalled or told to fail.
template <typename... Arguments>
int Do(const char* call, int (*CudaDriver::*function)(Arguments...), std::type_identity_t<Arguments>... arguments) {
  AwaitRelease(call);
  const int failure = fake::SettingOf("FAKE_CUDA_FAIL", call);
  // A GPU that is out of service runs nothing any more, and no kernel reads what its process frees.
  const bool waits = std::string_view(call).ends_with("Synchronize");
  if (failure != 0 && !waits) return failure;
  const simulator::InProcess here(&TheProcess());
  const int result = (TheProcess().driver().*function)(arguments...);
  return failure != 0 ? failure : result;
}

template <typename Function>
struct ArgumentsOf;
template <typename... Arguments>
struct ArgumentsOf<int (*)(Arguments...)> {
  using Types = std::tuple<Arguments...>;
};
template <typename Function, size_t i>
using Argument = std::tuple_element_t<i, typename ArgumentsOf<Function>::Types>;

}  // namespace

extern "C" {

#define A(member, i) Argument<decltype(CudaDriver::member), i>
#define CALL_1(symbol, member) \
  int symbol(A(member, 0) a) { return Do(#symbol, &CudaDriver::member, a); }
#define CALL_2(symbol, member) \
  int symbol(A(member, 0) a, A(member, 1) b) { return Do(#symbol, &CudaDriver::member, a, b); }
#define CALL_3(symbol, member) \
  int symbol(A(member, 0) a, A(member, 1) b, A(member, 2) c) { return Do(#symbol, &CudaDriver::member, a, b, c); }
#define CALL_4(symbol, member)                                                 \
  int symbol(A(member, 0) a, A(member, 1) b, A(member, 2) c, A(member, 3) d) { \
    return Do(#symbol, &CudaDriver::member, a, b, c, d);                       \
  }
#define CALL_5(symbol, member)                                                                 \
  int symbol(A(member, 0) a, A(member, 1) b, A(member, 2) c, A(member, 3) d, A(member, 4) e) { \
    return Do(#symbol, &CudaDriver::member, a, b, c, d, e);                                    \
  }
CALL_1(cuInit, Init)
CALL_1(cuDeviceGetCount, DeviceGetCount)
CALL_2(cuDeviceGet, DeviceGet)
CALL_3(cuDeviceGetName, DeviceGetName)
CALL_3(cuDeviceGetAttribute, DeviceGetAttribute)
CALL_2(cuDeviceGetUuid_v2, DeviceGetUuid)
CALL_3(cuDeviceCanAccessPeer, DeviceCanAccessPeer)
CALL_3(cuDevicePrimaryCtxGetState, DevicePrimaryCtxGetState)
CALL_2(cuDevicePrimaryCtxRetain, DevicePrimaryCtxRetain)
CALL_1(cuDevicePrimaryCtxRelease_v2, DevicePrimaryCtxRelease)
CALL_1(cuCtxSetCurrent, CtxSetCurrent)
CALL_1(cuCtxPushCurrent_v2, CtxPushCurrent)
CALL_1(cuCtxPopCurrent_v2, CtxPopCurrent)
CALL_2(cuModuleLoadData, ModuleLoadData)
CALL_1(cuModuleUnload, ModuleUnload)
CALL_3(cuModuleGetFunction, ModuleGetFunction)
CALL_3(cuFuncSetAttribute, FuncSetAttribute)
CALL_2(cuMemAlloc_v2, MemAlloc)
CALL_1(cuMemFree_v2, MemFree)
CALL_2(cuMemGetInfo_v2, MemGetInfo)
CALL_3(cuMemGetAllocationGranularity, MemGetAllocationGranularity)
CALL_4(cuMemCreate, MemCreate)
CALL_1(cuMemRelease, MemRelease)
CALL_4(cuMemExportToShareableHandle, MemExportToShareableHandle)
CALL_3(cuMemImportFromShareableHandle, MemImportFromShareableHandle)
CALL_5(cuMemAddressReserve, MemAddressReserve)
CALL_2(cuMemAddressFree, MemAddressFree)
CALL_5(cuMemMap, MemMap)
CALL_2(cuMemUnmap, MemUnmap)
CALL_4(cuMemSetAccess, MemSetAccess)
CALL_3(cuMemHostAlloc, MemHostAlloc)
CALL_1(cuMemFreeHost, MemFreeHost)
CALL_3(cuMemHostRegister_v2, MemHostRegister)
CALL_1(cuMemHostUnregister, MemHostUnregister)
CALL_4(cuMemcpyDtoHAsync_v2, MemcpyDtoHAsync)
CALL_4(cuMemcpyDtoDAsync_v2, MemcpyDtoDAsync)
CALL_2(cuStreamCreate, StreamCreate)
CALL_1(cuStreamDestroy_v2, StreamDestroy)
CALL_1(cuStreamSynchronize, StreamSynchronize)
CALL_3(cuStreamWaitEvent, StreamWaitEvent)
CALL_2(cuStreamIsCapturing, StreamIsCapturing)
CALL_1(cuThreadExchangeStreamCaptureMode, ThreadExchangeStreamCaptureMode)
CALL_2(cuEventCreate, EventCreate)
CALL_1(cuEventDestroy_v2, EventDestroy)
CALL_2(cuEventRecord, EventRecord)
CALL_1(cuEventQuery, EventQuery)
CALL_1(cuEventSynchronize, EventSynchronize)
CALL_3(cuEventElapsedTime, EventElapsedTime)
CALL_2(cuGetErrorString, GetErrorString)

int cuMemcpyHtoDAsync_v2(CudaPointer to, const void* from, size_t bytes, CudaStream stream) {
  if (const auto hook = on_copy_to_gpu.load(); hook != nullptr) hook(to, bytes);
  return Do(__func__, &CudaDriver::MemcpyHtoDAsync, to, from, bytes, stream);
}
int cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                   void** extra) {
  const char* const name = fake::NameOf(function);
  if (const auto hook = on_launch.load(); hook != nullptr && name != nullptr) hook(name, grid_x, shared_bytes);
  return Do(__func__, &CudaDriver::LaunchKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
            shared_bytes, stream, arguments, extra);
}

int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuCtxSynchronize() { return simulator::SynchronizeContext(); }
int cuStreamBeginCapture_v2(CudaStream stream, int mode) {
  return simulator::BeginCapture(stream, static_cast<simulator::CaptureMode>(mode));
}
int cuStreamEndCapture(CudaStream stream, fake::Graph* graph) {
  return *graph = nullptr, simulator::EndCapture(stream);
}

// For tests, which find them with dlsym. Each copy to the GPU, or launch, calls the hook first; null: no longer.
void fakeCudaOnCopyToGpu(void (*hook)(uint64_t to, size_t bytes)) { on_copy_to_gpu = hook; }
void fakeCudaOnLaunch(void (*hook)(const char* name, unsigned blocks, unsigned shared_bytes)) { on_launch = hook; }

// Calls of this name wait until another is named, or none (null).
void fakeCudaStall(const char* call) {
  {
    std::lock_guard lock(stall_mu);
    stalled_call = call == nullptr ? "" : call;
    any_stalled.store(call != nullptr, std::memory_order_release);
  }
  stall_changed.notify_all();
}
// Returns when one waits.
void fakeCudaAwaitStalled() {
  std::unique_lock lock(stall_mu);
  stall_changed.wait(lock, [] { return stalled_threads > 0; });
}

// What has been made and not been given back.
int fakeCudaObjects() { return TheProcess().objects() + TheProcess().memory().objects(); }
// Copies that have waited because their host memory was not registered.
int fakeCudaPageableCopies() { return TheProcess().pageable_copies(); }
// Where the host finds the memory of a device pointer.
uint64_t fakeCudaAlias(uint64_t pointer) { return fake::Memory::AliasOf(pointer); }
// Bytes of this process's GPU memory, now and at most since the last reset.
size_t fakeCudaUsedBytes() { return TheProcess().memory().UsedBytes(); }
size_t fakeCudaPeakBytes() { return TheProcess().memory().PeakBytes(); }
void fakeCudaResetPeak() { TheProcess().memory().ResetPeak(); }
// How many GPUs may use the memory.
int fakeCudaAccessors(uint64_t pointer) { return static_cast<int>(TheProcess().memory().Accessors(pointer).size()); }

// Work of a stream; null: of the calling thread.
int fakeCudaIssue(void* stream, void (*work)(void*), void* argument) {
  const auto operation = [=](const std::function<void()>& done) {
    work(argument);
    done();
  };
  if (stream == nullptr) return TheProcess().clock().DoNow(operation);
  return simulator::Issue(reinterpret_cast<CudaStream>(stream), operation);
}

}  // extern "C"

// Each is what the product calls, which tests/unit/kernels/gpu/cuda_abi_test.cc holds against the toolkit's header.
#define CUDA_FUNCTION(symbol, member) \
  static_assert(std::is_same_v<decltype(&symbol), decltype(CudaDriver::member)>, #symbol);
#include "kernels/gpu/cuda_functions.inc"
#define CUDA_FUNCTION(symbol, ...) static_assert(std::is_same_v<decltype(&symbol), __VA_ARGS__>, #symbol);
#include "tests/support/fake_cuda/more_functions.inc"
