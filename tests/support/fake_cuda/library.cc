// A libcuda.so.1 for machines without a GPU: it covers everything up to the driver's calls, and says nothing about a
// GPU. It is process.h's under the wall clock (thread_clock.h): streams are threads that are late, copies outlive their
// process (outlive.h), and what goes wrong elsewhere goes wrong here when told to (settings.h).
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <type_traits>

#include "kernels/gpu/cuda_driver.h"
#include "tests/support/fake_cuda/addresses.h"
#include "tests/support/fake_cuda/launch.h"
#include "tests/support/fake_cuda/memory.h"
#include "tests/support/fake_cuda/outlive.h"
#include "tests/support/fake_cuda/process.h"
#include "tests/support/fake_cuda/settings.h"
#include "tests/support/fake_cuda/thread_clock.h"

namespace fake = superoffload::fake_cuda;
namespace simulator = superoffload::simulator;
using superoffload::kernels::CudaAccess;
using superoffload::kernels::CudaAllocation;
using superoffload::kernels::CudaAllocationProperties;
using superoffload::kernels::CudaContext;
using superoffload::kernels::CudaDevice;
using superoffload::kernels::CudaDriver;
using superoffload::kernels::CudaEvent;
using superoffload::kernels::CudaFunction;
using superoffload::kernels::CudaModule;
using superoffload::kernels::CudaPointer;
using superoffload::kernels::CudaStream;
using superoffload::kernels::CudaUuid;

namespace {

class ThisProcess final : public fake::Process {
 public:
  using fake::Process::Process;

  fake::Machine machine() const override { return fake::ThisMachine(); }
  bool has_threads() const override { return true; }

  void Move(const Copy& copy, const std::function<void(size_t, size_t)>& move, const Done& done) override {
    const std::chrono::microseconds longer(fake::SettingOf("FAKE_CUDA_SLOW", copy.to_gpu ? "HtoD" : "DtoH"));
    std::optional<fake::UnfinishedCopy> unfinished;
    if (!copy.to_gpu) {
      unfinished.emplace(copy.host, memory().OnGpu(reinterpret_cast<const void*>(copy.gpu), copy.bytes), copy.bytes);
    }
    if (longer.count() > 0) std::this_thread::sleep_for(longer);
    move(0, copy.bytes);
    unfinished.reset();
    done();
  }

  void Work(const std::function<void()>& work, const Done& done) override {
    work();
    done();
  }
};

// Never destroyed: streams that are left run until the process ends.
ThisProcess& TheProcess() {
  static auto* const process = [] {
    static auto* const clock = new fake::ThreadClock([] { return fake::Setting("FAKE_CUDA_DELAY"); });
    static auto* const memory = new fake::Memory(fake::ThisMachine, fake::OutOfMemory);
    auto* const made = new ThisProcess(clock, memory);
    simulator::SetOnlyProcess(made);
    return made;
  }();
  return *process;
}

const CudaDriver& Driver() { return TheProcess().driver(); }

std::atomic<fakeCudaCopyHook> on_copy_to_gpu = nullptr;
std::atomic<fakeCudaLaunchHook> on_launch = nullptr;

// A call that may be stalled, told to fail, or too late.
template <typename... Arguments>
int Told(const char* call, int (*CudaDriver::*function)(Arguments...), std::type_identity_t<Arguments>... arguments) {
  fake::AwaitRelease(call);
  if (const int failure = fake::SettingOf("FAKE_CUDA_FAIL", call); failure != 0) return failure;
  if (const int fault = TheProcess().fault(); fault != 0) return fault;
  return (Driver().*function)(arguments...);
}

}  // namespace

extern "C" {

int cuInit(unsigned flags) { return Told(__func__, &CudaDriver::Init, flags); }
int cuDeviceGetCount(int* count) { return Driver().DeviceGetCount(count); }
int cuDeviceGet(CudaDevice* device, int ordinal) { return Driver().DeviceGet(device, ordinal); }
int cuDeviceGetName(char* name, int bytes, CudaDevice device) { return Driver().DeviceGetName(name, bytes, device); }
int cuDeviceGetAttribute(int* value, int attribute, CudaDevice device) {
  return Driver().DeviceGetAttribute(value, attribute, device);
}
int cuDeviceGetUuid_v2(CudaUuid* uuid, CudaDevice device) { return Driver().DeviceGetUuid(uuid, device); }
int cuDeviceCanAccessPeer(int* can, CudaDevice device, CudaDevice peer) {
  return Driver().DeviceCanAccessPeer(can, device, peer);
}
int cuDevicePrimaryCtxGetState(CudaDevice device, unsigned* flags, int* active) {
  return Driver().DevicePrimaryCtxGetState(device, flags, active);
}
int cuDevicePrimaryCtxRetain(CudaContext* context, CudaDevice device) {
  return Told(__func__, &CudaDriver::DevicePrimaryCtxRetain, context, device);
}
int cuDevicePrimaryCtxRelease_v2(CudaDevice device) { return Driver().DevicePrimaryCtxRelease(device); }
int cuCtxSetCurrent(CudaContext context) { return Driver().CtxSetCurrent(context); }
int cuCtxPushCurrent_v2(CudaContext context) { return Driver().CtxPushCurrent(context); }
int cuCtxPopCurrent_v2(CudaContext* context) { return Driver().CtxPopCurrent(context); }
int cuModuleLoadData(CudaModule* module, const void* image) {
  return Told(__func__, &CudaDriver::ModuleLoadData, module, image);
}
int cuModuleUnload(CudaModule module) { return Told(__func__, &CudaDriver::ModuleUnload, module); }
int cuModuleGetFunction(CudaFunction* function, CudaModule module, const char* name) {
  return Told(__func__, &CudaDriver::ModuleGetFunction, function, module, name);
}
int cuFuncSetAttribute(CudaFunction function, int attribute, int value) {
  return Told(__func__, &CudaDriver::FuncSetAttribute, function, attribute, value);
}
int cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                   void** extra) {
  const char* const name = fake::NameOf(function);
  if (const fakeCudaLaunchHook hook = on_launch; hook != nullptr && name != nullptr) hook(name, grid_x, shared_bytes);
  return Told(__func__, &CudaDriver::LaunchKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
              shared_bytes, stream, arguments, extra);
}
int cuMemAlloc_v2(CudaPointer* pointer, size_t bytes) { return Told(__func__, &CudaDriver::MemAlloc, pointer, bytes); }
int cuMemFree_v2(CudaPointer pointer) { return Told(__func__, &CudaDriver::MemFree, pointer); }
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return Told(__func__, &CudaDriver::MemGetInfo, free_bytes, total_bytes);
}
int cuMemGetAllocationGranularity(size_t* bytes, const CudaAllocationProperties* properties, int option) {
  return Driver().MemGetAllocationGranularity(bytes, properties, option);
}
int cuMemCreate(CudaAllocation* allocation, size_t bytes, const CudaAllocationProperties* properties,
                unsigned long long flags) {
  return Told(__func__, &CudaDriver::MemCreate, allocation, bytes, properties, flags);
}
int cuMemRelease(CudaAllocation allocation) { return Driver().MemRelease(allocation); }
int cuMemExportToShareableHandle(void* handle, CudaAllocation allocation, int type, unsigned long long flags) {
  return Told(__func__, &CudaDriver::MemExportToShareableHandle, handle, allocation, type, flags);
}
int cuMemImportFromShareableHandle(CudaAllocation* allocation, void* handle, int type) {
  return Told(__func__, &CudaDriver::MemImportFromShareableHandle, allocation, handle, type);
}
int cuMemAddressReserve(CudaPointer* pointer, size_t bytes, size_t alignment, CudaPointer at,
                        unsigned long long flags) {
  return Driver().MemAddressReserve(pointer, bytes, alignment, at, flags);
}
int cuMemAddressFree(CudaPointer pointer, size_t bytes) { return Driver().MemAddressFree(pointer, bytes); }
int cuMemMap(CudaPointer pointer, size_t bytes, size_t offset, CudaAllocation allocation, unsigned long long flags) {
  return Driver().MemMap(pointer, bytes, offset, allocation, flags);
}
int cuMemUnmap(CudaPointer pointer, size_t bytes) { return Driver().MemUnmap(pointer, bytes); }
int cuMemSetAccess(CudaPointer pointer, size_t bytes, const CudaAccess* access, size_t count) {
  return Told(__func__, &CudaDriver::MemSetAccess, pointer, bytes, access, count);
}
int cuMemHostAlloc(void** data, size_t bytes, unsigned flags) {
  return Told(__func__, &CudaDriver::MemHostAlloc, data, bytes, flags);
}
int cuMemFreeHost(void* data) { return Told(__func__, &CudaDriver::MemFreeHost, data); }
int cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  return Told(__func__, &CudaDriver::MemHostRegister, data, bytes, flags);
}
int cuMemHostUnregister(void* data) { return Told(__func__, &CudaDriver::MemHostUnregister, data); }
int cuMemcpyHtoDAsync_v2(CudaPointer to, const void* from, size_t bytes, CudaStream stream) {
  if (const fakeCudaCopyHook hook = on_copy_to_gpu; hook != nullptr) hook(to, bytes);
  return Told(__func__, &CudaDriver::MemcpyHtoDAsync, to, from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, CudaPointer from, size_t bytes, CudaStream stream) {
  return Told(__func__, &CudaDriver::MemcpyDtoHAsync, to, from, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream) {
  return Told(__func__, &CudaDriver::MemcpyDtoDAsync, to, from, bytes, stream);
}
int cuStreamCreate(CudaStream* stream, unsigned flags) {
  return Told(__func__, &CudaDriver::StreamCreate, stream, flags);
}
int cuStreamDestroy_v2(CudaStream stream) { return Driver().StreamDestroy(stream); }
int cuStreamSynchronize(CudaStream stream) { return Told(__func__, &CudaDriver::StreamSynchronize, stream); }
int cuStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned flags) {
  return Told(__func__, &CudaDriver::StreamWaitEvent, stream, event, flags);
}
int cuStreamIsCapturing(CudaStream stream, int* status) {
  return Told(__func__, &CudaDriver::StreamIsCapturing, stream, status);
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return Driver().ThreadExchangeStreamCaptureMode(mode); }
int cuEventCreate(CudaEvent* event, unsigned flags) { return Told(__func__, &CudaDriver::EventCreate, event, flags); }
int cuEventDestroy_v2(CudaEvent event) { return Driver().EventDestroy(event); }
int cuEventRecord(CudaEvent event, CudaStream stream) {
  return Told(__func__, &CudaDriver::EventRecord, event, stream);
}
int cuEventQuery(CudaEvent event) { return Told(__func__, &CudaDriver::EventQuery, event); }
int cuEventSynchronize(CudaEvent event) { return Told(__func__, &CudaDriver::EventSynchronize, event); }
int cuEventElapsedTime(float* milliseconds, CudaEvent begin, CudaEvent end) {
  return Driver().EventElapsedTime(milliseconds, begin, end);
}
int cuGetErrorString(int result, const char** text) { return Driver().GetErrorString(result, text); }

int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuCtxSynchronize() { return simulator::SynchronizeContext(); }
int cuStreamBeginCapture_v2(CudaStream stream, int mode) {
  return simulator::BeginCapture(stream, static_cast<simulator::CaptureMode>(mode));
}
int cuStreamEndCapture(CudaStream stream, fake::Graph* graph) {
  *graph = nullptr;
  return simulator::EndCapture(stream);
}

void fakeCudaOnCopyToGpu(fakeCudaCopyHook hook) { on_copy_to_gpu = hook; }
void fakeCudaOnLaunch(fakeCudaLaunchHook hook) { on_launch = hook; }
int fakeCudaPageableCopies() { return TheProcess().pageable_copies(); }
int fakeCudaObjects() { return TheProcess().objects() + TheProcess().memory().objects(); }
uint64_t fakeCudaAlias(uint64_t pointer) { return fake::IsAddress(pointer) ? fake::AliasOf(pointer) : pointer; }
size_t fakeCudaUsedBytes() { return TheProcess().memory().UsedBytes(); }
size_t fakeCudaPeakBytes() { return TheProcess().memory().PeakBytes(); }
void fakeCudaResetPeak() { TheProcess().memory().ResetPeak(); }
int fakeCudaAccessors(uint64_t pointer) { return static_cast<int>(TheProcess().memory().Accessors(pointer).size()); }

// For fake_nccl.cc and tests.
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
