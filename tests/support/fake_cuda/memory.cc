#include "tests/support/fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {
namespace {

// Addresses of device memory, and of its aliases behind them.
constexpr uint64_t kArenaBytes = uint64_t{1} << 34;
constexpr uint64_t kBlockBytes = uint64_t{2} << 20;
constexpr uint64_t kPageBytes = 4096;

uint64_t Arena() {
  static const uint64_t begin = [] {
    void* const data = ::mmap(nullptr, 2 * kArenaBytes + kBlockBytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) std::abort();
    return (reinterpret_cast<uint64_t>(data) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  }();
  return begin;
}

uint64_t Alias(uint64_t pointer) { return pointer + kArenaBytes; }
bool InArena(uint64_t pointer) { return pointer >= Arena() && pointer < Arena() + kArenaBytes; }

// Physical memory: used while somebody refers to it. That of another process counts there.
class Physical {
 public:
  explicit Physical(size_t bytes, bool exportable = false) : exportable(exportable), bytes_(bytes) {
    used += bytes_;
    peak = std::max(peak, used);
  }
  ~Physical() { used -= bytes_; }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  const bool exportable;
  static inline size_t used = 0, peak = 0;

 private:
  const size_t bytes_;
};
using PhysicalPtr = std::shared_ptr<Physical>;  // a handle's and its mappings'

struct Mapped {
  size_t bytes;
  int fd;
  PhysicalPtr physical;
  std::vector<int> accessors;
};
std::mutex mu;
std::map<uint64_t, size_t> ranges;  // of addresses, taken
std::map<uint64_t, Mapped> mapped;
std::map<uint64_t, PhysicalPtr> created;  // VMM allocations that this process has handles of
struct Host {
  size_t bytes;
  bool allocated;  // by the driver
  PhysicalPtr tables;
};
std::map<uint64_t, Host> registered;
std::set<int> contexts;  // by device
uint64_t cursor = 0;  // addresses are not used again soon, so that who uses freed memory is noticed

size_t SizeOf(const Mapped& mapping) { return mapping.bytes; }
size_t SizeOf(const Host& host) { return host.bytes; }
size_t SizeOf(size_t bytes) { return bytes; }

// The one that contains all of it, or end().
template <typename Map>
auto Containing(const Map& map, uint64_t pointer, size_t bytes) {
  auto found = map.upper_bound(pointer);
  if (found == map.begin()) return map.end();
  --found;
  const size_t offset = pointer - found->first, size = SizeOf(found->second);
  return offset <= size && bytes <= size - offset ? found : map.end();
}

uint64_t TakeRange(size_t bytes) {
  bytes = std::max((bytes + kBlockBytes - 1) / kBlockBytes, uint64_t{1}) * kBlockBytes;
  for (const uint64_t first : {std::max(cursor, Arena()), Arena()}) {
    for (uint64_t at = first; bytes <= kArenaBytes && at + bytes <= Arena() + kArenaBytes;) {
      const auto after = ranges.lower_bound(at + bytes);
      if (after == ranges.begin() || std::prev(after)->first + std::prev(after)->second <= at) {
        ranges[at] = bytes;
        cursor = at + bytes;
        CountObject(1);
        return at;
      }
      at = std::prev(after)->first + std::prev(after)->second;
    }
  }
  return 0;
}

void GiveRangeBack(uint64_t pointer) {
  if (ranges.erase(pointer) == 1) CountObject(-1);
}

int MakeFile(size_t bytes) {
  const int fd = ::memfd_create("fake-gpu-memory", MFD_CLOEXEC);
  return fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? fd : -1;
}

size_t FileBytes(int fd) {
  struct stat file {};
  return ::fstat(fd, &file) == 0 ? static_cast<size_t>(file.st_size) : 0;
}

// Takes the descriptor over.
int MapFile(uint64_t pointer, size_t bytes, int fd, int protection, PhysicalPtr physical) {
  if (::mmap(reinterpret_cast<void*>(Alias(pointer)), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    ::close(fd);
    return kOutOfMemory;
  }
  mapped[pointer] = {bytes, fd, std::move(physical), {}};
  CountObject(1);
  return 0;
}

int UnmapFile(uint64_t pointer) {
  const auto found = mapped.find(pointer);
  if (found == mapped.end()) return kInvalidValue;
  ::mmap(reinterpret_cast<void*>(Alias(pointer)), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  ::close(found->second.fd);
  mapped.erase(found);
  CountObject(-1);
  return 0;
}

// The machine may have become another one, with the same contexts.
size_t ContextBytes() {
  const int mib = Setting("FAKE_CUDA_CONTEXT_MIB", static_cast<int>(ThisMachine().context_bytes >> 20));
  return static_cast<size_t>(mib) << 20;
}
size_t Used() { return Physical::used + contexts.size() * ContextBytes(); }

bool IsLeft(size_t bytes) {
  return Used() <= ThisMachine().memory_bytes && bytes <= ThisMachine().memory_bytes - Used();
}
bool Fits(size_t bytes) { return !OutOfMemory() && IsLeft(bytes); }

bool InGranules(uint64_t pointer, size_t bytes) {
  return bytes > 0 && pointer % kGranularity == 0 && bytes % kGranularity == 0;
}

bool AnyMapped(uint64_t pointer, size_t bytes) {
  const auto after = mapped.lower_bound(pointer + bytes);
  return after != mapped.begin() && std::prev(after)->first + std::prev(after)->second.bytes > pointer;
}

// Whether mappings cover all of it, one behind the other.
bool Covered(uint64_t pointer, size_t bytes) {
  const uint64_t end = pointer + bytes;
  while (true) {
    const auto found = Containing(mapped, pointer, 1);
    if (found == mapped.end()) return false;
    pointer = found->first + found->second.bytes;
    if (pointer >= end) return true;
  }
}

uint64_t PageBegin(uint64_t address) { return address / kPageBytes * kPageBytes; }
uint64_t PageEnd(uint64_t address) { return PageBegin(address + kPageBytes - 1); }

// Whether something is mapped at all of its pages.
bool Exists(uint64_t begin, size_t bytes) {
  const size_t pages = (PageEnd(begin + bytes) - PageBegin(begin)) / kPageBytes;
  std::vector<unsigned char> resident(pages);
  return ::mincore(reinterpret_cast<void*>(PageBegin(begin)), pages * kPageBytes, resident.data()) == 0;
}

// The ranges that have pages in common with this one.
bool AnyRegistered(uint64_t begin, size_t bytes) {
  return std::ranges::any_of(registered, [=](const auto& other) {
    return PageBegin(begin) < PageEnd(other.first + other.second.bytes) &&
           PageBegin(other.first) < PageEnd(begin + bytes);
  });
}

int RegisterAs(uint64_t begin, size_t bytes, bool allocated) {
  if (begin == 0 || bytes == 0 || !Exists(begin, bytes)) return kInvalidValue;
  if (AnyRegistered(begin, bytes)) return kAlreadyRegistered;
  const size_t pages = (PageEnd(begin + bytes) - PageBegin(begin)) / kPageBytes;
  const auto cost =
      static_cast<size_t>(Setting("FAKE_CUDA_REGISTER_COST", static_cast<int>(ThisMachine().register_cost)));
  if (!IsLeft(pages * cost)) return kOutOfMemory;
  registered[begin] = {bytes, allocated, std::make_shared<Physical>(pages * cost)};
  CountObject(1);
  return 0;
}

// False: there is none of this kind.
bool Forget(void* data, bool allocated) {
  const auto found = registered.find(reinterpret_cast<uint64_t>(data));
  if (found == registered.end() || found->second.allocated != allocated) return false;
  registered.erase(found);
  CountObject(-1);
  return true;
}

}  // namespace

int Allocate(uint64_t* pointer, size_t bytes) {
  std::lock_guard lock(mu);
  if (bytes == 0 || !Fits(bytes)) return kOutOfMemory;
  const int fd = MakeFile(bytes);
  *pointer = fd < 0 ? 0 : TakeRange(bytes);
  if (*pointer == 0) {
    if (fd >= 0) ::close(fd);
    return kOutOfMemory;
  }
  const int result = MapFile(*pointer, bytes, fd, PROT_READ | PROT_WRITE, std::make_shared<Physical>(bytes));
  if (result != 0) GiveRangeBack(*pointer);
  return result;
}

int Free(uint64_t pointer) {
  std::lock_guard lock(mu);
  const int result = UnmapFile(pointer);
  if (result == 0) GiveRangeBack(pointer);
  return result;
}

size_t UsedBytes() {
  std::lock_guard lock(mu);
  return Used();
}
size_t PeakBytes() {
  std::lock_guard lock(mu);
  return Physical::peak + contexts.size() * ContextBytes();
}
void ResetPeak() {
  std::lock_guard lock(mu);
  Physical::peak = Physical::used;
}

int Create(kernels::CudaAllocation* allocation, size_t bytes, bool exportable) {
  std::lock_guard lock(mu);
  if (!InGranules(0, bytes)) return kInvalidValue;
  const int fd = Fits(bytes) ? MakeFile(bytes) : -1;
  if (fd < 0) return kOutOfMemory;
  *allocation = static_cast<kernels::CudaAllocation>(fd);
  created[*allocation] = std::make_shared<Physical>(bytes, exportable);
  CountObject(1);
  return 0;
}

int Import(kernels::CudaAllocation* allocation, int descriptor) {
  const int fd = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kInvalidValue;
  *allocation = static_cast<kernels::CudaAllocation>(fd);
  std::lock_guard lock(mu);
  created[*allocation] = std::make_shared<Physical>(0);
  CountObject(1);
  return 0;
}

int Export(kernels::CudaAllocation allocation, int* descriptor) {
  std::lock_guard lock(mu);
  const auto found = created.find(allocation);
  if (found == created.end() || !found->second->exportable) return kInvalidValue;
  *descriptor = ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0);
  return *descriptor < 0 ? kInvalidValue : 0;
}

int Release(kernels::CudaAllocation allocation) {
  std::lock_guard lock(mu);
  if (created.erase(allocation) != 1) return kInvalidValue;
  CountObject(-1);
  ::close(static_cast<int>(allocation));
  return 0;
}

int Reserve(uint64_t* pointer, size_t bytes) {
  std::lock_guard lock(mu);
  if (!InGranules(0, bytes)) return kInvalidValue;
  *pointer = TakeRange(bytes);
  return *pointer == 0 ? kOutOfMemory : 0;
}

int Unreserve(uint64_t pointer, size_t bytes) {
  std::lock_guard lock(mu);
  const auto found = ranges.find(pointer);
  if (found == ranges.end() || found->second != bytes || AnyMapped(pointer, bytes)) return kInvalidValue;
  GiveRangeBack(pointer);
  return 0;
}

int Map(uint64_t pointer, size_t bytes, kernels::CudaAllocation allocation) {
  std::lock_guard lock(mu);
  const auto handle = created.find(allocation);
  if (handle == created.end() || !InGranules(pointer, bytes)) return kInvalidValue;
  if (Containing(ranges, pointer, bytes) == ranges.end() || AnyMapped(pointer, bytes)) return kInvalidValue;
  if (FileBytes(static_cast<int>(allocation)) < bytes) return kInvalidValue;
  return MapFile(pointer, bytes, ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0), PROT_NONE, handle->second);
}

int SetAccess(uint64_t pointer, size_t bytes, const std::vector<int>& devices) {
  std::lock_guard lock(mu);
  const auto gpus = static_cast<int>(Uuids().size());
  for (const int device : devices) {
    if (device < 0 || device >= gpus) return kInvalidDevice;
  }
  if (!InGranules(pointer, bytes) || !Covered(pointer, bytes)) return kInvalidValue;
  for (auto it = mapped.lower_bound(pointer); it != mapped.end() && it->first < pointer + bytes; ++it) {
    for (const int device : devices) {
      std::vector<int>& accessors = it->second.accessors;
      if (std::ranges::find(accessors, device) == accessors.end()) accessors.push_back(device);
    }
  }
  return ::mprotect(reinterpret_cast<void*>(Alias(pointer)), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalidValue;
}

std::vector<int> Accessors(uint64_t pointer) {
  std::lock_guard lock(mu);
  const auto found = Containing(mapped, pointer, 1);
  return found == mapped.end() ? std::vector<int>() : found->second.accessors;
}

int Unmap(uint64_t pointer, size_t bytes) {
  std::lock_guard lock(mu);
  const auto found = mapped.find(pointer);
  return found == mapped.end() || found->second.bytes != bytes ? kInvalidValue : UnmapFile(pointer);
}

int TakeContext(int device) {
  std::lock_guard lock(mu);
  if (!IsLeft(ContextBytes())) return kOutOfMemory;
  contexts.insert(device);
  return 0;
}

void GiveContextBack(int device) {
  std::lock_guard lock(mu);
  contexts.erase(device);
}

int Register(void* data, size_t bytes) {
  std::lock_guard lock(mu);
  return RegisterAs(reinterpret_cast<uint64_t>(data), bytes, false);
}

int Unregister(void* data) {
  std::lock_guard lock(mu);
  return Forget(data, false) ? 0 : kNotRegistered;
}

int AllocateHost(void** data, size_t bytes) {
  *data = OutOfMemory() ? nullptr : std::aligned_alloc(kPageBytes, PageEnd(bytes));
  if (*data == nullptr) return kOutOfMemory;
  std::lock_guard lock(mu);
  const int result = RegisterAs(reinterpret_cast<uint64_t>(*data), bytes, true);
  if (result != 0) std::free(std::exchange(*data, nullptr));
  return result;
}

int FreeHost(void* data) {
  std::lock_guard lock(mu);
  if (!Forget(data, true)) return kInvalidValue;
  std::free(data);
  return 0;
}

Pinned IsPinned(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(data);
  std::lock_guard lock(mu);
  if (Containing(registered, begin, bytes) != registered.end()) return Pinned::kAll;
  const auto after = registered.lower_bound(begin + bytes);
  const bool touched = after != registered.begin() && std::prev(after)->first + std::prev(after)->second.bytes > begin;
  return touched ? Pinned::kInPart : Pinned::kNone;
}

void* OnGpu(const void* pointer, size_t bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (InArena(address)) {
    return IsDevicePointer(address, bytes) ? reinterpret_cast<void*>(Alias(address)) : nullptr;
  }
  const bool usable = ThisMachine().pageable_access || Setting("FAKE_CUDA_HOST_IS_GPU") != 0;
  return usable || IsPinned(pointer, bytes) == Pinned::kAll ? const_cast<void*>(pointer) : nullptr;
}

bool IsDevicePointer(uint64_t pointer, size_t bytes) {
  std::lock_guard lock(mu);
  return InArena(pointer) && Covered(pointer, std::max(bytes, size_t{1}));
}

}  // namespace superoffload::fake_cuda

extern "C" {

uint64_t fakeCudaAlias(uint64_t pointer) {
  return superoffload::fake_cuda::InArena(pointer) ? superoffload::fake_cuda::Alias(pointer) : pointer;
}
size_t fakeCudaUsedBytes() { return superoffload::fake_cuda::UsedBytes(); }
size_t fakeCudaPeakBytes() { return superoffload::fake_cuda::PeakBytes(); }
void fakeCudaResetPeak() { superoffload::fake_cuda::ResetPeak(); }
int fakeCudaAccessors(uint64_t pointer) {
  return static_cast<int>(superoffload::fake_cuda::Accessors(pointer).size());
}

}  // extern "C"
