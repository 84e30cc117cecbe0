#include "tests/support/fake_cuda/process.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/support/fake_cuda/launch.h"

namespace superoffload::fake_cuda {

using kernels::CudaAccess;
using kernels::CudaAllocation;
using kernels::CudaAllocationProperties;
using kernels::CudaDevice;
using kernels::CudaFunction;
using kernels::CudaModule;
using kernels::CudaPointer;
using kernels::CudaStream;
using kernels::CudaUuid;

namespace {

constexpr int kBrokenUuid = 13;       // of a GPU that must not be opened by mistake
constexpr int kClockKhz = 1'980'000;  // an H100's

// What a call needs that works in a context, or needs none; `IsSafe`: a capture forbids it, to the threads that its
// mode names.
#define IN_CONTEXT(process)                                                          \
  simulator::Process* found;                                                         \
  if (const int result = simulator::FindCurrent(&found); result != 0) return result; \
  Process& process = static_cast<Process&>(*found)
#define IN_CONTEXT_AND_SAFE(process)                                                        \
  simulator::Process* found;                                                                \
  if (const int result = simulator::FindCurrentAndSafe(&found); result != 0) return result; \
  Process& process = static_cast<Process&>(*found)

Process& Calling() { return static_cast<Process&>(simulator::CallingProcess()); }
const Machine ThatMachine() { return Calling().machine(); }
Memory& ThatMemory() { return Calling().memory(); }

int GetCount(int* count) { return *count = static_cast<int>(ThatMachine().uuids.size()), kOk; }
int Get(CudaDevice* device, int ordinal) {
  const bool exists = ordinal >= 0 && ordinal < static_cast<int>(ThatMachine().uuids.size());
  return *device = ordinal, exists ? kOk : kInvalidDevice;
}
int GetName(char* name, int bytes, CudaDevice) {
  return std::strncpy(name, ThatMachine().name, static_cast<size_t>(bytes)), kOk;
}
int GetAttribute(int* value, int attribute, CudaDevice) {
  const Machine machine = ThatMachine();
  *value = attribute == kernels::kCudaPageableMemoryAccess      ? machine.pageable_access
           : attribute == kernels::kCudaHostPageTables          ? machine.host_page_tables
           : attribute == kernels::kCudaClockKhz                ? kClockKhz
           : attribute == kernels::kCudaMostSharedBytesPerBlock ? static_cast<int>(machine.shared_bytes)
           : LaunchAttribute(attribute) != 0                    ? LaunchAttribute(attribute)
                                                                : 1;
  return kOk;
}
int GetUuid(CudaUuid* uuid, CudaDevice device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(ThatMachine().uuids.at(static_cast<size_t>(device)));
  return kOk;
}
int CanAccessPeer(int* can, CudaDevice device, CudaDevice peer) {
  return *can = device != peer && ThatMachine().peers, kOk;
}

int LoadModuleData(CudaModule* module, const void* image) {
  IN_CONTEXT_AND_SAFE(process);
  if (image == nullptr) return kInvalidValue;
  return LoadModule(process, reinterpret_cast<void**>(module));
}
int Unload(CudaModule module) {
  IN_CONTEXT_AND_SAFE(process);
  return UnloadModule(process, module);
}
int FindFunction(CudaFunction* function, CudaModule module, const char* name) {
  return GetFunction(reinterpret_cast<void**>(function), module, name);
}
int SetFunctionAttribute(CudaFunction function, int attribute, int value) {
  if (attribute != kernels::kCudaFunctionDynamicSharedBytes) return kInvalidValue;
  return AllowShared(Calling(), function, value);
}
int LaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                 unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                 void**) {
  IN_CONTEXT(process);
  return Launch(process, function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream,
                arguments);
}

int Allocate(CudaPointer* pointer, size_t bytes) {
  IN_CONTEXT_AND_SAFE(process);
  return process.memory().Allocate(pointer, bytes);
}
int Free(CudaPointer pointer) {
  IN_CONTEXT_AND_SAFE(process);
  return process.memory().Free(pointer);
}
int GetInfo(size_t* free_bytes, size_t* total_bytes) {
  IN_CONTEXT(process);
  *total_bytes = process.machine().memory_bytes;
  *free_bytes = *total_bytes - std::min(*total_bytes, process.memory().UsedBytes());
  return kOk;
}
int GetGranularity(size_t* bytes, const CudaAllocationProperties*, int) { return *bytes = Memory::kGranularity, kOk; }
int Create(CudaAllocation* allocation, size_t bytes, const CudaAllocationProperties* properties, unsigned long long) {
  return ThatMemory().Create(allocation, bytes, properties->handle_types != 0);
}
int Release(CudaAllocation allocation) { return ThatMemory().Release(allocation); }
int Export(void* handle, CudaAllocation allocation, int, unsigned long long) {
  return ThatMemory().Export(allocation, static_cast<int*>(handle));
}
int Import(CudaAllocation* allocation, void* handle, int) {
  return ThatMemory().Import(allocation, static_cast<int>(reinterpret_cast<intptr_t>(handle)));
}
int Reserve(CudaPointer* pointer, size_t bytes, size_t, CudaPointer, unsigned long long) {
  return ThatMemory().Reserve(pointer, bytes);
}
int Unreserve(CudaPointer pointer, size_t bytes) { return ThatMemory().Unreserve(pointer, bytes); }
int Map(CudaPointer pointer, size_t bytes, size_t, CudaAllocation allocation, unsigned long long) {
  return ThatMemory().Map(pointer, bytes, allocation);
}
int Unmap(CudaPointer pointer, size_t bytes) { return ThatMemory().Unmap(pointer, bytes); }
int SetAccess(CudaPointer pointer, size_t bytes, const CudaAccess* accesses, size_t count) {
  std::vector<int> devices;
  for (size_t i = 0; i < count; ++i) devices.push_back(accesses[i].location.id);
  return ThatMemory().SetAccess(pointer, bytes, devices);
}

int Register(void* data, size_t bytes, unsigned) {
  IN_CONTEXT_AND_SAFE(process);
  return process.memory().Register(data, bytes);
}
int Unregister(void* data) {
  IN_CONTEXT_AND_SAFE(process);
  return process.memory().Unregister(data);
}
int AllocateHost(void** data, size_t bytes, unsigned) {
  IN_CONTEXT_AND_SAFE(process);
  return process.memory().AllocateHost(data, bytes);
}
int FreeHost(void* data) {
  IN_CONTEXT_AND_SAFE(process);
  return process.memory().FreeHost(data);
}

int CopyUp(CudaPointer to, const void* from, size_t bytes, CudaStream stream) {
  IN_CONTEXT(process);
  return process.Enqueue({true, to, const_cast<std::byte*>(static_cast<const std::byte*>(from)), bytes}, stream);
}
int CopyDown(void* to, CudaPointer from, size_t bytes, CudaStream stream) {
  IN_CONTEXT(process);
  return process.Enqueue({false, from, static_cast<std::byte*>(to), bytes}, stream);
}
int CopyWithin(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream) {
  IN_CONTEXT(process);
  const auto work = [&process, to, from, bytes] {
    void* const target = process.memory().OnGpu(reinterpret_cast<void*>(to), bytes);
    const void* const source = process.memory().OnGpu(reinterpret_cast<void*>(from), bytes);
    if (target == nullptr || source == nullptr) return process.SetFault();
    std::memcpy(target, source, bytes);
  };
  return simulator::Issue(stream, [&process, work](const Process::Done& done) { process.Work(work, done); });
}

#undef IN_CONTEXT
#undef IN_CONTEXT_AND_SAFE

}  // namespace

const kernels::CudaDriver& Process::driver() const {
  static const kernels::CudaDriver table = [] {
    kernels::CudaDriver d{};
    simulator::AddCommonFunctions(&d);
    d.Init = [](unsigned) { return kOk; };
    d.DeviceGetCount = &GetCount;
    d.DeviceGet = &Get;
    d.DeviceGetName = &GetName;
    d.DeviceGetAttribute = &GetAttribute;
    d.DeviceGetUuid = &GetUuid;
    d.DeviceCanAccessPeer = &CanAccessPeer;
    d.ModuleLoadData = &LoadModuleData;
    d.ModuleUnload = &Unload;
    d.ModuleGetFunction = &FindFunction;
    d.FuncSetAttribute = &SetFunctionAttribute;
    d.LaunchKernel = &LaunchKernel;
    d.MemAlloc = &Allocate;
    d.MemFree = &Free;
    d.MemGetInfo = &GetInfo;
    d.MemGetAllocationGranularity = &GetGranularity;
    d.MemCreate = &Create;
    d.MemRelease = &Release;
    d.MemExportToShareableHandle = &Export;
    d.MemImportFromShareableHandle = &Import;
    d.MemAddressReserve = &Reserve;
    d.MemAddressFree = &Unreserve;
    d.MemMap = &Map;
    d.MemUnmap = &Unmap;
    d.MemSetAccess = &SetAccess;
    d.MemHostAlloc = &AllocateHost;
    d.MemFreeHost = &FreeHost;
    d.MemHostRegister = &Register;
    d.MemHostUnregister = &Unregister;
    d.MemcpyHtoDAsync = &CopyUp;
    d.MemcpyDtoHAsync = &CopyDown;
    d.MemcpyDtoDAsync = &CopyWithin;
    return d;
  }();
  return table;
}

int Process::TakeContext(CudaDevice device) {
  const Machine that = machine();
  if (device < 0 || device >= static_cast<int>(that.uuids.size())) return kInvalidDevice;
  if (that.uuids[static_cast<size_t>(device)] == kBrokenUuid) return kEccUncorrectable;
  return memory_.TakeContext(device);
}

int Process::Enqueue(const Copy& copy, CudaStream stream) {
  const Machine that = machine();
  if (!that.host_is_gpu && !memory_.IsDevicePointer(copy.gpu, copy.bytes)) return kInvalidValue;
  const Memory::Pinned pinned = memory_.IsPinned(copy.host, copy.bytes);
  if (pinned == Memory::Pinned::kInPart) return kInvalidValue;
  const bool waits = pinned == Memory::Pinned::kNone && !that.host_page_tables;
  if (waits && that.refuses_pageable) return kInvalidValue;
  if (waits) ++pageable_copies_;
  const bool needs_pinned = pinned == Memory::Pinned::kAll && !that.host_page_tables;
  const int result = simulator::Issue(stream, [this, copy, needs_pinned](const Done& done) {
    Move(copy, [=, this](size_t first, size_t bytes) { MovePiece(copy, needs_pinned, first, bytes); }, done);
  });
  return waits && result == kOk ? simulator::Synchronize(stream) : result;
}

void Process::MovePiece(const Copy& copy, bool needs_pinned, size_t first, size_t bytes) {
  if (needs_pinned && memory_.IsPinned(copy.host, copy.bytes) != Memory::Pinned::kAll)
    return SetFault();  // not any longer
  void* const on_gpu = memory_.OnGpu(reinterpret_cast<const void*>(copy.gpu + first), bytes);
  if (on_gpu == nullptr) return SetFault();
  std::byte* const host = copy.host + first;
  copy.to_gpu ? std::memcpy(on_gpu, host, bytes) : std::memcpy(host, on_gpu, bytes);
}

}  // namespace superoffload::fake_cuda
