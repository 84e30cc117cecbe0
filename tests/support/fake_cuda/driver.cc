// A libcuda.so.1 for machines without a GPU: it covers everything up to the driver's calls, and says nothing about a
// GPU. It is meant to be no kinder than hardware: device memory is not the host's (memory.h), streams are late
// (stream.h), copies of memory that is not registered wait, launches that no GPU could run are refused (launch.h), copies
// outlive their process (outlive.h), and what goes wrong elsewhere goes wrong here when told to (machine.h). A thread without a current context can do next to nothing.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/gpu/cuda_driver.h"
#include "tests/support/fake_cuda/kernels.h"
#include "tests/support/fake_cuda/launch.h"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/fake_cuda/memory.h"
#include "tests/support/fake_cuda/outlive.h"
#include "tests/support/fake_cuda/stream.h"

namespace fake = superoffload::fake_cuda;
using superoffload::kernels::CudaAccess;
using superoffload::kernels::CudaAllocation;
using superoffload::kernels::CudaAllocationProperties;
using superoffload::kernels::CudaContext;
using superoffload::kernels::CudaDriver;
using superoffload::kernels::CudaEvent;
using superoffload::kernels::CudaFunction;
using superoffload::kernels::CudaModule;
using superoffload::kernels::CudaPointer;
using superoffload::kernels::CudaStream;
using superoffload::kernels::CudaUuid;

namespace {

constexpr int kBrokenUuid = 13;  // of a GPU that must not be opened by mistake
constexpr int kClockKhz = 1'980'000;  // an H100's

int context;  // its address is its handle
std::mutex contexts_mu;
int primary_contexts[16];  // by device: who uses it
thread_local std::vector<CudaContext> contexts;  // the last one is current

std::atomic<int> pageable_copies = 0;
std::atomic<fakeCudaCopyHook> on_copy_to_gpu = nullptr;
std::atomic<fakeCudaLaunchHook> on_launch = nullptr;

// What every call does first; and those that do something in a context.
#define FAIL_IF_TOLD()                                                                               \
  fake::AwaitRelease(__func__);                                                                      \
  if (const int failure = fake::SettingOf("FAKE_CUDA_FAIL", __func__); failure != 0) return failure; \
  if (const int fault = fake::Fault(); fault != 0) return fault
#define IN_CONTEXT() \
  FAIL_IF_TOLD();    \
  if (contexts.empty() || contexts.back() == nullptr) return fake::kInvalidContext
// And those that a capture forbids, to the threads that its mode names.
#define IN_CONTEXT_AND_SAFE() \
  IN_CONTEXT();               \
  if (const int forbidden = fake::CheckSafe(); forbidden != 0) return forbidden

// `host` is one of the two.
int Copy(const char* direction, const void* to, const void* from, const void* host, size_t bytes, void* stream) {
  const void* const device = host == to ? from : to;
  const bool host_is_gpu = fake::Setting("FAKE_CUDA_HOST_IS_GPU") != 0;
  if (!host_is_gpu && !fake::IsDevicePointer(reinterpret_cast<uint64_t>(device), bytes)) return fake::kInvalidValue;
  const fake::Pinned pinned = fake::IsPinned(host, bytes);
  if (pinned == fake::Pinned::kInPart) return fake::kInvalidValue;
  const bool pageable = fake::ThisMachine().host_page_tables;
  const bool waits = pinned == fake::Pinned::kNone && !pageable;
  if (waits && fake::Setting("FAKE_CUDA_REFUSE_PAGEABLE") != 0) return fake::kInvalidValue;
  if (waits) ++pageable_copies;
  const bool needs_pinned = pinned == fake::Pinned::kAll && !pageable;
  const std::chrono::microseconds longer(fake::SettingOf("FAKE_CUDA_SLOW", direction));
  fake::Issue(stream, [=] {
    std::optional<fake::UnfinishedCopy> unfinished;
    if (host == to) unfinished.emplace(const_cast<void*>(to), fake::OnGpu(from, bytes), bytes);
    if (longer.count() > 0) std::this_thread::sleep_for(longer);
    if (needs_pinned && fake::IsPinned(host, bytes) != fake::Pinned::kAll) return fake::SetFault();  // not any longer
    void* const on_gpu = fake::OnGpu(device, bytes);
    if (on_gpu == nullptr) {
      fake::SetFault();
    } else if (host == to) {
      std::memcpy(const_cast<void*>(to), on_gpu, bytes);
    } else {
      std::memcpy(on_gpu, from, bytes);
    }
  });
  return waits ? fake::Synchronize(stream) : 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  FAIL_IF_TOLD();
  return 0;
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = static_cast<int>(fake::Uuids().size()), 0; }
int cuDeviceGet(int* device, int ordinal) {
  const bool exists = ordinal >= 0 && ordinal < static_cast<int>(fake::Uuids().size());
  return *device = ordinal, exists ? 0 : fake::kInvalidDevice;
}
int cuDeviceGetName(char* name, int bytes, int) {
  return std::strncpy(name, fake::ThisMachine().name, static_cast<size_t>(bytes)), 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const fake::Machine& machine = fake::ThisMachine();
  *value = attribute == superoffload::kernels::kCudaPageableMemoryAccess ? machine.pageable_access
           : attribute == superoffload::kernels::kCudaHostPageTables     ? machine.host_page_tables
           : attribute == superoffload::kernels::kCudaClockKhz           ? kClockKhz
           : attribute == superoffload::kernels::kCudaMostSharedBytesPerBlock ? static_cast<int>(machine.shared_bytes)
           : fake::LaunchAttribute(attribute) != 0                            ? fake::LaunchAttribute(attribute)
                                                                              : 1;
  return 0;
}
int cuDeviceGetUuid_v2(CudaUuid* uuid, int device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(fake::Uuids().at(static_cast<size_t>(device)));
  return 0;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = device != peer && fake::Setting("FAKE_CUDA_NO_PEERS") == 0, 0;
}
int cuDevicePrimaryCtxRetain(CudaContext* handle, int device) {
  FAIL_IF_TOLD();
  if (fake::Uuids().at(static_cast<size_t>(device)) == kBrokenUuid) return fake::kEccUncorrectable;
  std::lock_guard lock(contexts_mu);
  if (primary_contexts[device] == 0) {
    if (const int result = fake::TakeContext(device); result != 0) return result;
  }
  fake::CountObject(1);
  ++primary_contexts[device];
  return *handle = reinterpret_cast<CudaContext>(&context), 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  std::lock_guard lock(contexts_mu);
  if (primary_contexts[device] == 0) return fake::kInvalidContext;
  if (--primary_contexts[device] == 0) fake::GiveContextBack(device);
  return fake::CountObject(-1), 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  std::lock_guard lock(contexts_mu);
  return *flags = 0, *active = primary_contexts[device] > 0, 0;
}
int cuCtxSetCurrent(CudaContext handle) {
  if (contexts.empty()) contexts.push_back(nullptr);
  return contexts.back() = handle, 0;
}
int cuCtxPushCurrent_v2(CudaContext handle) { return contexts.push_back(handle), 0; }
int cuCtxSynchronize() {
  IN_CONTEXT();
  return fake::SynchronizeAll();
}
int cuCtxPopCurrent_v2(CudaContext* popped) {
  if (contexts.empty()) return fake::kInvalidContext;
  *popped = contexts.back();
  return contexts.pop_back(), 0;
}
int cuModuleLoadData(CudaModule* handle, const void* image) {
  IN_CONTEXT_AND_SAFE();
  if (image == nullptr) return fake::kInvalidValue;
  return fake::LoadModule(reinterpret_cast<void**>(handle));
}
int cuModuleUnload(CudaModule module) {
  IN_CONTEXT_AND_SAFE();
  return fake::UnloadModule(module);
}
int cuModuleGetFunction(CudaFunction* function, CudaModule module, const char* name) {
  FAIL_IF_TOLD();
  return fake::GetFunction(reinterpret_cast<void**>(function), module, name);
}
int cuFuncSetAttribute(CudaFunction function, int attribute, int value) {
  FAIL_IF_TOLD();
  if (attribute != superoffload::kernels::kCudaFunctionDynamicSharedBytes) return fake::kInvalidValue;
  return fake::AllowShared(function, value);
}
int cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                   void**) {
  IN_CONTEXT();
  const char* const name = fake::NameOf(function);
  if (const fakeCudaLaunchHook hook = on_launch; hook != nullptr && name != nullptr) hook(name, grid_x, shared_bytes);
  return fake::Launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, arguments);
}

int cuMemAlloc_v2(CudaPointer* pointer, size_t bytes) {
  IN_CONTEXT_AND_SAFE();
  return fake::Allocate(pointer, bytes);
}
int cuMemFree_v2(CudaPointer pointer) {
  IN_CONTEXT_AND_SAFE();
  return fake::Free(pointer);
}
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  IN_CONTEXT();
  *total_bytes = fake::ThisMachine().memory_bytes;
  *free_bytes = *total_bytes - std::min(*total_bytes, fake::UsedBytes());
  return 0;
}
int cuMemGetAllocationGranularity(size_t* bytes, const CudaAllocationProperties*, int) { return *bytes = fake::kGranularity, 0; }
int cuMemCreate(CudaAllocation* allocation, size_t bytes, const CudaAllocationProperties* properties,
                unsigned long long) {
  FAIL_IF_TOLD();
  return fake::Create(allocation, bytes, properties->handle_types != 0);
}
int cuMemRelease(CudaAllocation allocation) { return fake::Release(allocation); }
int cuMemExportToShareableHandle(void* handle, CudaAllocation allocation, int, unsigned long long) {
  FAIL_IF_TOLD();
  return fake::Export(allocation, static_cast<int*>(handle));
}
int cuMemImportFromShareableHandle(CudaAllocation* allocation, void* handle, int) {
  FAIL_IF_TOLD();
  return fake::Import(allocation, static_cast<int>(reinterpret_cast<intptr_t>(handle)));
}
int cuMemAddressReserve(CudaPointer* pointer, size_t bytes, size_t, CudaPointer, unsigned long long) {
  return fake::Reserve(pointer, bytes);
}
int cuMemAddressFree(CudaPointer pointer, size_t bytes) { return fake::Unreserve(pointer, bytes); }
int cuMemMap(CudaPointer pointer, size_t bytes, size_t, CudaAllocation allocation, unsigned long long) {
  return fake::Map(pointer, bytes, allocation);
}
int cuMemUnmap(CudaPointer pointer, size_t bytes) { return fake::Unmap(pointer, bytes); }
int cuMemSetAccess(CudaPointer pointer, size_t bytes, const CudaAccess* accesses, size_t count) {
  FAIL_IF_TOLD();
  std::vector<int> devices;
  for (size_t i = 0; i < count; ++i) devices.push_back(accesses[i].location.id);
  return fake::SetAccess(pointer, bytes, devices);
}

int cuMemHostRegister_v2(void* data, size_t bytes, unsigned) {
  IN_CONTEXT_AND_SAFE();
  return fake::Register(data, bytes);
}
int cuMemHostUnregister(void* data) {
  IN_CONTEXT_AND_SAFE();
  return fake::Unregister(data);
}
int cuMemHostAlloc(void** data, size_t bytes, unsigned) {
  IN_CONTEXT_AND_SAFE();
  return fake::AllocateHost(data, bytes);
}
int cuMemFreeHost(void* data) {
  IN_CONTEXT_AND_SAFE();
  return fake::FreeHost(data);
}

int cuMemcpyHtoDAsync_v2(CudaPointer to, const void* from, size_t bytes, CudaStream stream) {
  IN_CONTEXT();
  if (const fakeCudaCopyHook hook = on_copy_to_gpu; hook != nullptr) hook(to, bytes);
  return Copy("HtoD", reinterpret_cast<void*>(to), from, from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, CudaPointer from, size_t bytes, CudaStream stream) {
  IN_CONTEXT();
  return Copy("DtoH", to, reinterpret_cast<const void*>(from), to, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream) {
  IN_CONTEXT();
  return fake::Issue(stream, [=] {
    void* const target = fake::OnGpu(reinterpret_cast<void*>(to), bytes);
    const void* const source = fake::OnGpu(reinterpret_cast<void*>(from), bytes);
    if (target == nullptr || source == nullptr) return fake::SetFault();
    std::memcpy(target, source, bytes);
  });
}

int cuStreamCreate(CudaStream* stream, unsigned) {
  IN_CONTEXT();
  return *stream = reinterpret_cast<CudaStream>(fake::MakeStream()), 0;
}
int cuStreamDestroy_v2(CudaStream stream) { return fake::DestroyStream(stream); }
int cuStreamSynchronize(CudaStream stream) {
  IN_CONTEXT_AND_SAFE();
  return fake::Synchronize(stream);
}
int cuStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned) {
  IN_CONTEXT();
  return fake::WaitForEvent(stream, *reinterpret_cast<fake::Event*>(event));
}
int cuStreamIsCapturing(CudaStream stream, int* status) {
  IN_CONTEXT();
  return fake::IsCapturing(stream, status);
}
int cuStreamBeginCapture_v2(CudaStream stream, int mode) {
  return fake::BeginCapture(stream, static_cast<fake::CaptureMode>(mode));
}
int cuStreamEndCapture(CudaStream stream, fake::Graph* graph) {
  *graph = nullptr;
  return fake::EndCapture(stream);
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = static_cast<int>(fake::ExchangeCaptureMode(static_cast<fake::CaptureMode>(*mode)));
  return 0;
}

int cuEventCreate(CudaEvent* event, unsigned) {
  IN_CONTEXT();
  return fake::CountObject(1), *event = reinterpret_cast<CudaEvent>(new fake::Event), 0;
}
int cuEventDestroy_v2(CudaEvent event) {
  return fake::CountObject(-1), delete reinterpret_cast<fake::Event*>(event), 0;
}
int cuEventRecord(CudaEvent event, CudaStream stream) {
  IN_CONTEXT();
  return fake::RecordEvent(reinterpret_cast<fake::Event*>(event), stream);
}
int cuEventQuery(CudaEvent event) {
  FAIL_IF_TOLD();
  if (const int forbidden = fake::CheckSafe(); forbidden != 0) return forbidden;
  const std::shared_ptr<fake::Record> record = reinterpret_cast<fake::Event*>(event)->latest;
  if (record != nullptr && record->capture != nullptr) return fake::kCapturedEvent;
  return record == nullptr || record->reached ? 0 : superoffload::kernels::kCudaNotReady;
}
int cuEventSynchronize(CudaEvent event) {
  FAIL_IF_TOLD();
  if (const int forbidden = fake::CheckSafe(); forbidden != 0) return forbidden;
  const std::shared_ptr<fake::Record> record = reinterpret_cast<fake::Event*>(event)->latest;
  if (record == nullptr) return 0;
  if (record->capture != nullptr) return fake::kCapturedEvent;
  return record->Await(), fake::Fault();
}
int cuEventElapsedTime(float* milliseconds, CudaEvent begin, CudaEvent end) {
  const auto elapsed = reinterpret_cast<fake::Event*>(end)->latest->reached_at -
                       reinterpret_cast<fake::Event*>(begin)->latest->reached_at;
  return *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count(), 0;
}
int cuGetErrorString(int result, const char** text) {
  return *text = result == fake::kOutOfMemory ? "out of memory" : "an error", 0;
}

void fakeCudaOnCopyToGpu(fakeCudaCopyHook hook) { on_copy_to_gpu = hook; }
int fakeCudaPageableCopies() { return pageable_copies; }
void fakeCudaOnLaunch(fakeCudaLaunchHook hook) { on_launch = hook; }

// For fake_nccl.cc and tests.
int fakeCudaIssue(void* stream, void (*work)(void*), void* argument) {
  return fake::Issue(stream, [=] { work(argument); });
}

}  // extern "C"

// Each is what the product calls, which tests/unit/kernels/gpu/cuda_abi_test.cc holds against the toolkit's header.
#define CUDA_FUNCTION(symbol, member) \
  static_assert(std::is_same_v<decltype(&symbol), decltype(CudaDriver::member)>, #symbol);
#include "kernels/gpu/cuda_functions.inc"
#define CUDA_FUNCTION(symbol, ...) static_assert(std::is_same_v<decltype(&symbol), __VA_ARGS__>, #symbol);
#include "tests/support/fake_cuda/more_functions.inc"
