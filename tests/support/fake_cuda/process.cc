#include "tests/support/fake_cuda/process.h"

#include <cstring>
#include <map>
#include <type_traits>

#include "tests/support/fake_cuda/launch.h"

namespace superoffload::fake_cuda {

using kernels::CudaDevice;
using kernels::CudaPointer;
using kernels::CudaStream;
using simulator::Needs;

namespace {

constexpr int kBrokenUuid = 13;       // of a GPU that must not be opened by mistake
constexpr int kClockKhz = 1'980'000;  // an H100's
constexpr int kRegisters = 64 << 10, kWarp = 32, kMultiprocessors = 132;

int GetCount(Process& process, int* count) { return *count = static_cast<int>(process.machine().uuids.size()), kOk; }
int Get(Process& process, CudaDevice* device, int ordinal) {
  const bool exists = ordinal >= 0 && ordinal < static_cast<int>(process.machine().uuids.size());
  return *device = ordinal, exists ? kOk : kInvalidDevice;
}
int GetName(Process& process, char* name, int bytes, CudaDevice) {
  return std::strncpy(name, process.machine().name, static_cast<size_t>(bytes)), kOk;
}
int GetDeviceAttribute(Process& process, int* value, int attribute, CudaDevice) {
  const Machine machine = process.machine();
  const std::map<int, int64_t> values = {{1, kMostThreads},
                                         {2, kMostThreads},
                                         {3, kMostThreads},
                                         {4, kMostBlockZ},
                                         {5, kMostGridX},
                                         {6, kMostGridYz},
                                         {7, kMostGridYz},
                                         {8, kSharedBytes},
                                         {10, kWarp},
                                         {12, kRegisters},
                                         {16, kMultiprocessors},
                                         {kernels::kCudaClockKhz, kClockKhz},
                                         {kernels::kCudaPageableMemoryAccess, machine.pageable_access},
                                         {kernels::kCudaHostPageTables, machine.host_page_tables},
                                         {kernels::kCudaMostSharedBytesPerBlock, machine.shared_bytes}};
  const auto found = values.find(attribute);
  return *value = found == values.end() ? 1 : static_cast<int>(found->second), kOk;
}
int GetUuid(Process& process, kernels::CudaUuid* uuid, CudaDevice device) {
  *uuid = {};
  return uuid->bytes[0] = static_cast<char>(process.machine().uuids.at(static_cast<size_t>(device))), kOk;
}
int CanAccessPeer(Process& process, int* can, CudaDevice device, CudaDevice peer) {
  return *can = device != peer && process.machine().peers, kOk;
}
int CopyWithin(Process& process, CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream) {
  const auto work = [&process, to, from, bytes] {
    void* const target = process.memory().OnGpu(reinterpret_cast<void*>(to), bytes);
    const void* const source = process.memory().OnGpu(reinterpret_cast<void*>(from), bytes);
    if (target == nullptr || source == nullptr) return process.SetFault();
    std::memcpy(target, source, bytes);
  };
  return simulator::Issue(stream, [&process, work](const Process::Done& done) { process.Work(work, done); });
}

// Calls a function of those above or of launch.h, or one of the process's memory.
template <auto function, typename... Arguments>
int CallOf(simulator::Process& found, Arguments... arguments) {
  auto& process = static_cast<Process&>(found);
  if constexpr (std::is_member_function_pointer_v<decltype(function)>) {
    return (process.memory().*function)(arguments...);
  } else {
    return function(process, arguments...);
  }
}
template <Needs needs, auto function, typename... Arguments>
int Call(Arguments... arguments) {
  return simulator::Call<needs, &CallOf<function, Arguments...>>(arguments...);
}

}  // namespace

const kernels::CudaDriver& Process::driver() const {
  static const kernels::CudaDriver table = [] {
    constexpr Needs kProcess = Needs::kProcess, kContext = Needs::kContext, kSafe = Needs::kContextAndSafe;
    kernels::CudaDriver d{};
    simulator::AddCommonFunctions(&d);
    d.Init = [](unsigned) { return kOk; };
    d.DeviceGetCount = &Call<kProcess, &GetCount>;
    d.DeviceGet = &Call<kProcess, &Get>;
    d.DeviceGetName = &Call<kProcess, &GetName>;
    d.DeviceGetAttribute = &Call<kProcess, &GetDeviceAttribute>;
    d.DeviceGetUuid = &Call<kProcess, &GetUuid>;
    d.DeviceCanAccessPeer = &Call<kProcess, &CanAccessPeer>;
    d.ModuleLoadData = &Call<kSafe, &LoadModule>;
    d.ModuleUnload = &Call<kSafe, &UnloadModule>;
    d.ModuleGetFunction = &Call<kProcess, &GetFunction>;
    d.FuncSetAttribute = &Call<kProcess, &SetAttribute>;
    d.LaunchKernel = &Call<kContext, &Launch>;
    d.MemAlloc = &Call<kSafe, &Memory::Allocate>;
    d.MemFree = &Call<kSafe, &Memory::Free>;
    d.MemGetInfo = &Call<kContext, &Memory::GetInfo>;
    d.MemGetAllocationGranularity = &Call<kProcess, &Memory::GetGranularity>;
    d.MemCreate = &Call<kProcess, &Memory::Create>;
    d.MemRelease = &Call<kProcess, &Memory::Release>;
    d.MemExportToShareableHandle = &Call<kProcess, &Memory::Export>;
    d.MemImportFromShareableHandle = &Call<kProcess, &Memory::Import>;
    d.MemAddressReserve = &Call<kProcess, &Memory::Reserve>;
    d.MemAddressFree = &Call<kProcess, &Memory::Unreserve>;
    d.MemMap = &Call<kProcess, &Memory::Map>;
    d.MemUnmap = &Call<kProcess, &Memory::Unmap>;
    d.MemSetAccess = &Call<kProcess, &Memory::SetAccess>;
    d.MemHostAlloc = &Call<kSafe, &Memory::AllocateHost>;
    d.MemFreeHost = &Call<kSafe, &Memory::FreeHost>;
    d.MemHostRegister = &Call<kSafe, &Memory::Register>;
    d.MemHostUnregister = &Call<kSafe, &Memory::Unregister>;
    d.MemcpyDtoDAsync = &Call<kContext, &CopyWithin>;
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

int Process::Copy(const simulator::GpuCopy& copy, CudaStream stream) {
  const Machine that = machine();
  if (!that.host_is_gpu && !memory_.IsDevicePointer(copy.gpu, copy.bytes)) return kInvalidValue;
  const Memory::Pinned pinned = memory_.IsPinned(copy.host, copy.bytes);
  if (pinned == Memory::Pinned::kInPart) return kInvalidValue;
  const bool waits = pinned == Memory::Pinned::kNone && !that.host_page_tables;
  if (waits && that.refuses_pageable) return kInvalidValue;
  if (waits) ++pageable_copies_;
  const bool needs_pinned = pinned == Memory::Pinned::kAll && !that.host_page_tables;
  const auto move = [this, copy, needs_pinned](size_t first, size_t bytes) {
    void* const on_gpu = memory_.OnGpu(reinterpret_cast<const void*>(copy.gpu + first), bytes);
    const bool unpinned = needs_pinned && memory_.IsPinned(copy.host, copy.bytes) != Memory::Pinned::kAll;  // meanwhile
    if (unpinned || on_gpu == nullptr) return SetFault();
    std::byte* const host = copy.host + first;
    copy.to_gpu ? std::memcpy(on_gpu, host, bytes) : std::memcpy(host, on_gpu, bytes);
  };
  const int result = simulator::Issue(stream, [this, copy, move](const Done& done) { Move(copy, move, done); });
  return waits && result == kOk ? simulator::Synchronize(stream) : result;
}

}  // namespace superoffload::fake_cuda
