// A libcuda.so.1 for machines without a GPU. It covers everything up to the driver's calls, and says nothing about a
// GPU.
//
// Device memory is the host's, at the same addresses, in files that other processes can map. Each stream is a thread
// that runs its work in order. So whoever forgets a wait gets wrong bits, the
// surer the longer the streams dawdle. The GPU kernels' sources run on the host.
//
//   FAKE_CUDA_FAIL   "cuMemAlloc_v2=2,cuIpcGetMemHandle=801": these calls end with these CUresults
//   FAKE_CUDA_DELAY  microseconds by which each piece of a stream's work is delayed at most, at random
//   FAKE_CUDA_UUID   first bytes of the GPUs' UUIDs, "7,3" for two of them; 0 is the default and the only one
//   FAKE_CUDA_COHERENT  1: the GPU reads and writes the host's pageable memory
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "kernels/adam/adam_element.h"
#include "kernels/cuda/cuda_driver.h"
#include "kernels/cuda/kernels.cuh"
#include "tests/unit/kernels/fake_cuda.h"

// A thread of the host for each of a block's would take long; the kernel's result does not depend on how many there
// are.
namespace superoffload::kernels {
inline constexpr unsigned kFakePackThreads = 16;
}
#define kPackThreads kFakePackThreads
// After fake_cuda.h.
#include "kernels/cuda/pack.cu"
#include "kernels/cuda/resident.cu"

using superoffload::kernels::CudaAccess;
using superoffload::kernels::CudaAllocationProperties;
using superoffload::kernels::CudaIpcMemoryHandle;
using superoffload::kernels::CudaUuid;
using superoffload::kernels::PackArguments;
using superoffload::kernels::ResidentArguments;

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500, kInvalidContext = 201, kEccUncorrectable = 214,
              kAlreadyRegistered = 712;
constexpr int kBrokenUuid = 13;  // of a GPU that must not be opened by mistake

int Failure(const char* call) {
  const char* const failures = std::getenv("FAKE_CUDA_FAIL");
  if (failures == nullptr) return 0;
  const std::string text = std::string(",") + failures;
  const size_t at = text.find("," + std::string(call) + "=");
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + std::strlen(call) + 2);
}
#define FAIL_IF_TOLD() \
  if (const int failure = Failure(__func__); failure != 0) return failure

int Setting(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? 0 : std::atoi(value);
}

// First bytes of the GPUs' UUIDs, in the order in which this process counts them.
std::vector<int> Uuids() {
  const char* const value = std::getenv("FAKE_CUDA_UUID");
  std::stringstream text(value == nullptr ? "0" : value);
  std::vector<int> uuids;
  for (std::string uuid; std::getline(text, uuid, ',');) uuids.push_back(std::stoi(uuid));
  return uuids;
}

// Memory: a file per allocation, found by its address.
struct Mapped {
  size_t bytes;
  int fd;
};
std::mutex mu;
std::map<uint64_t, Mapped> allocations;

int MakeFile(size_t bytes) {
  const int fd = ::memfd_create("fake-gpu-memory", MFD_CLOEXEC);
  return fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? fd : -1;
}

int MapFile(uint64_t* pointer, int fd, size_t bytes, void* at = nullptr) {
  void* const data = ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at == nullptr ? 0 : MAP_FIXED), fd, 0);
  if (data == MAP_FAILED) return kOutOfMemory;
  *pointer = reinterpret_cast<uint64_t>(data);
  std::lock_guard lock(mu);
  allocations[*pointer] = {bytes, fd};
  return 0;
}

int Unmap(uint64_t pointer) {
  std::lock_guard lock(mu);
  const auto found = allocations.find(pointer);
  if (found == allocations.end()) return kInvalidValue;
  ::munmap(reinterpret_cast<void*>(pointer), found->second.bytes);
  ::close(found->second.fd);
  allocations.erase(found);
  return 0;
}

// What a handle is: a file of another process.
struct Handle {
  pid_t pid;
  int fd;
  uint64_t bytes;
};
static_assert(sizeof(Handle) <= sizeof(CudaIpcMemoryHandle));

int OpenHandle(const Handle& handle) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
  return ::open(path, O_RDWR | O_CLOEXEC);
}

// What one cuEventRecord stands for; a wait is bound to the latest when it is issued, whatever is recorded afterwards.
struct Record {
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point reached_at;

  void Await() const {
    while (!reached.load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
};

struct Event {
  std::shared_ptr<Record> latest;  // none: never recorded, and nobody waits
};

class Stream {
 public:
  Stream() : thread_([this] { Run(); }) {}
  ~Stream() {
    Synchronize();
    {
      std::lock_guard lock(mu_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  int Do(std::function<void()> work) {
    {
      std::lock_guard lock(mu_);
      work_.push_back(std::move(work));
    }
    changed_.notify_all();
    return 0;
  }

  void Synchronize() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return work_.empty(); });
  }

 private:
  void Run() {
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

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

// The default stream is the calling thread itself, as if the host computed what a trainer's GPU does.
int Issue(void* stream, std::function<void()> work) {
  if (stream != nullptr) return static_cast<Stream*>(stream)->Do(std::move(work));
  work();
  return 0;
}

void Synchronize(void* stream) {
  if (stream != nullptr) static_cast<Stream*>(stream)->Synchronize();
}

void RunAlone(const std::function<void()>& kernel) {
  static std::mutex* const one = new std::mutex;  // the fake's blocks share globals
  std::lock_guard lock(*one);
  kernel();
}

// Host memory that was registered: only copies of such memory are asynchronous, as on a GPU without coherence.
std::map<uint64_t, size_t> registered;

constexpr uint64_t kPageBytes = 4096;
uint64_t PageBegin(uint64_t address) { return address / kPageBytes * kPageBytes; }
uint64_t PageEnd(uint64_t address) { return PageBegin(address + kPageBytes - 1); }

bool IsRegistered(const void* data, size_t bytes) {
  if (Setting("FAKE_CUDA_COHERENT") != 0) return true;
  const uint64_t begin = reinterpret_cast<uint64_t>(data);
  std::lock_guard lock(mu);
  auto after = registered.upper_bound(begin);
  return after != registered.begin() && (--after, begin + bytes <= after->first + after->second);
}

// Whole pages, once each.
int RegisterPages(void* data, size_t bytes) {
  const uint64_t begin = reinterpret_cast<uint64_t>(data);
  std::lock_guard lock(mu);
  for (const auto& [other, other_bytes] : registered) {
    if (PageBegin(begin) < PageEnd(other + other_bytes) && PageBegin(other) < PageEnd(begin + bytes)) {
      return kAlreadyRegistered;
    }
  }
  registered[begin] = bytes;
  return 0;
}

int Copy(void* to, const void* from, size_t bytes, const void* host, void* stream) {
  Issue(stream, [=] { std::memcpy(to, from, bytes); });
  if (!IsRegistered(host, bytes)) Synchronize(stream);
  return 0;
}

int context, module;  // their addresses are handles
const char kPack[] = "superoffload_pack", kResident[] = "superoffload_resident_adam";

}  // namespace

extern "C" {

int cuInit(unsigned) {
  FAIL_IF_TOLD();
  return 0;
}
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = static_cast<int>(Uuids().size()), 0; }
int cuDeviceGet(int* device, int ordinal) {
  return *device = ordinal, ordinal >= 0 && ordinal < static_cast<int>(Uuids().size()) ? 0 : 101;
}
int cuDeviceGetName(char* name, int bytes, int) {
  return std::strncpy(name, "fake GPU", static_cast<size_t>(bytes)), 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const bool coherent = attribute == superoffload::kernels::kCudaPageableMemoryAccess ||
                        attribute == superoffload::kernels::kCudaHostPageTables;
  return *value = coherent ? Setting("FAKE_CUDA_COHERENT") : 1, 0;
}
int cuDeviceGetUuid_v2(CudaUuid* uuid, int device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(Uuids().at(static_cast<size_t>(device)));
  return 0;
}
int cuDevicePrimaryCtxRetain(void** handle, int device) {
  FAIL_IF_TOLD();
  if (Uuids().at(static_cast<size_t>(device)) == kBrokenUuid) return kEccUncorrectable;
  return *handle = &context, 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void** popped) { return *popped = &context, 0; }
int cuModuleLoadData(void** handle, const void* image) {
  FAIL_IF_TOLD();
  return *handle = &module, image == nullptr ? kInvalidValue : 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(const void** function, void*, const char* name) {
  for (const char* known : {kPack, kResident}) {
    if (std::strcmp(name, known) == 0) return *function = known, 0;
  }
  return kNotFound;
}
int cuLaunchKernel(const void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                   unsigned, void* stream, void** arguments, void**) {
  FAIL_IF_TOLD();
  if (function == kPack) {
    return Issue(stream, [grid, a = *static_cast<PackArguments*>(arguments[0])] {
      RunAlone(
          [&] { LaunchFake(superoffload::kernels::superoffload_pack, grid, superoffload::kernels::kPackThreads, a); });
    });
  }
  return Issue(stream, [grid, block, a = *static_cast<ResidentArguments*>(arguments[0])] {
    RunAlone([&] { LaunchFakeInTurn(superoffload::kernels::superoffload_resident_adam, grid, block, a); });
  });
}

int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  FAIL_IF_TOLD();
  return MapFile(pointer, MakeFile(bytes), bytes);
}
int cuMemFree_v2(uint64_t pointer) { return Unmap(pointer); }
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = size_t{4} << 30;
  *total_bytes = size_t{8} << 30;
  return 0;
}
int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t pointer) {
  std::lock_guard lock(mu);
  auto after = allocations.upper_bound(pointer);
  if (after == allocations.begin()) return kNotFound;
  --after;
  if (base != nullptr) *base = after->first;
  if (bytes != nullptr) *bytes = after->second.bytes;
  return 0;
}

int cuIpcGetMemHandle(CudaIpcMemoryHandle* handle, uint64_t pointer) {
  FAIL_IF_TOLD();
  std::lock_guard lock(mu);
  const auto found = allocations.find(pointer);
  if (found == allocations.end()) return kInvalidValue;
  const Handle content{::getpid(), found->second.fd, found->second.bytes};
  std::memcpy(handle, &content, sizeof(content));
  return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* pointer, CudaIpcMemoryHandle handle, unsigned) {
  FAIL_IF_TOLD();
  Handle content;
  std::memcpy(&content, &handle, sizeof(content));
  const int fd = OpenHandle(content);
  return fd < 0 ? kInvalidContext : MapFile(pointer, fd, content.bytes);
}
int cuIpcCloseMemHandle(uint64_t pointer) { return Unmap(pointer); }

int cuMemGetAllocationGranularity(size_t* bytes, const CudaAllocationProperties*, int) { return *bytes = 2u << 20, 0; }
int cuMemCreate(uint64_t* allocation, size_t bytes, const CudaAllocationProperties*, unsigned long long) {
  FAIL_IF_TOLD();
  const int fd = MakeFile(bytes);
  return *allocation = static_cast<uint64_t>(fd), fd < 0 ? kOutOfMemory : 0;
}
int cuMemRelease(uint64_t allocation) { return ::close(static_cast<int>(allocation)), 0; }
int cuMemExportToShareableHandle(void* handle, uint64_t allocation, int, unsigned long long) {
  FAIL_IF_TOLD();
  *static_cast<int*>(handle) = ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0);
  return 0;
}
int cuMemImportFromShareableHandle(uint64_t* allocation, void* handle, int) {
  FAIL_IF_TOLD();
  const int fd = ::fcntl(static_cast<int>(reinterpret_cast<intptr_t>(handle)), F_DUPFD_CLOEXEC, 0);
  return *allocation = static_cast<uint64_t>(fd), fd < 0 ? kInvalidValue : 0;
}
int cuMemAddressReserve(uint64_t* pointer, size_t bytes, size_t, uint64_t, unsigned long long) {
  *pointer = reinterpret_cast<uint64_t>(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  return 0;
}
int cuMemAddressFree(uint64_t, size_t) { return 0; }
int cuMemMap(uint64_t pointer, size_t bytes, size_t, uint64_t allocation, unsigned long long) {
  struct stat file {};
  ::fstat(static_cast<int>(allocation), &file);
  if (static_cast<uint64_t>(file.st_size) < bytes) return kInvalidValue;
  return MapFile(&pointer, ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0), bytes,
                 reinterpret_cast<void*>(pointer));
}
int cuMemUnmap(uint64_t pointer, size_t) { return Unmap(pointer); }
int cuMemSetAccess(uint64_t, size_t, const CudaAccess*, size_t) { return 0; }

int cuMemHostRegister_v2(void* data, size_t bytes, unsigned) {
  FAIL_IF_TOLD();
  return RegisterPages(data, bytes);
}
int cuMemHostUnregister(void* data) {
  std::lock_guard lock(mu);
  return registered.erase(reinterpret_cast<uint64_t>(data)) == 1 ? 0 : kInvalidValue;
}
int cuMemHostAlloc(void** data, size_t bytes, unsigned) {
  FAIL_IF_TOLD();
  *data = std::aligned_alloc(kPageBytes, PageEnd(bytes));
  return *data == nullptr ? kOutOfMemory : RegisterPages(*data, bytes);
}
int cuMemFreeHost(void* data) {
  const int result = cuMemHostUnregister(data);
  if (result == 0) std::free(data);
  return result;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  FAIL_IF_TOLD();
  return Copy(reinterpret_cast<void*>(to), from, bytes, from, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  FAIL_IF_TOLD();
  return Copy(to, reinterpret_cast<const void*>(from), bytes, to, stream);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return Issue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
}

int cuStreamCreate(void** stream, unsigned) { return *stream = new Stream, 0; }
int cuStreamDestroy_v2(void* stream) { return delete static_cast<Stream*>(stream), 0; }
int cuStreamSynchronize(void* stream) {
  FAIL_IF_TOLD();
  return Synchronize(stream), 0;
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  FAIL_IF_TOLD();
  const std::shared_ptr<Record> record = static_cast<Event*>(handle)->latest;
  return record == nullptr ? 0 : Issue(stream, [=] { record->Await(); });
}

int cuEventCreate(void** event, unsigned) { return *event = new Event, 0; }
int cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), 0; }
int cuEventRecord(void* event, void* stream) {
  FAIL_IF_TOLD();
  const auto record = std::make_shared<Record>();
  static_cast<Event*>(event)->latest = record;
  return Issue(stream, [=] {
    record->reached_at = std::chrono::steady_clock::now();
    record->reached.store(true, std::memory_order_release);
  });
}
int cuEventSynchronize(void* event) {
  FAIL_IF_TOLD();
  if (const std::shared_ptr<Record> record = static_cast<Event*>(event)->latest; record != nullptr) record->Await();
  return 0;
}
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  const auto elapsed = static_cast<Event*>(end)->latest->reached_at - static_cast<Event*>(begin)->latest->reached_at;
  return *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count(), 0;
}
int cuGetErrorString(int result, const char** text) {
  return *text = result == kOutOfMemory ? "out of memory" : "an error", 0;
}

// For fake_nccl.cc.
int fakeCudaIssue(void* stream, void (*work)(void*), void* argument) {
  return Issue(stream, [=] { work(argument); });
}

}  // extern "C"
