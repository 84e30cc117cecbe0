#include "tests/support/fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

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

struct Mapped {
  size_t bytes;
  int fd;
  bool allocated;  // counts as used
};
std::mutex mu;
std::map<uint64_t, size_t> ranges;  // of addresses, taken
std::map<uint64_t, Mapped> mapped;
std::map<uint64_t, size_t> created;  // VMM allocations of this process
std::map<uint64_t, size_t> registered;
uint64_t cursor = 0;  // addresses are not used again soon, so that who uses freed memory is noticed
size_t used = 0;

size_t SizeOf(const Mapped& mapping) { return mapping.bytes; }
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
int MapFile(uint64_t pointer, size_t bytes, int fd, int protection, bool allocated) {
  if (::mmap(reinterpret_cast<void*>(Alias(pointer)), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    ::close(fd);
    return kOutOfMemory;
  }
  mapped[pointer] = {bytes, fd, allocated};
  CountObject(1);
  if (allocated) used += bytes;
  return 0;
}

int UnmapFile(uint64_t pointer) {
  const auto found = mapped.find(pointer);
  if (found == mapped.end()) return kInvalidValue;
  ::mmap(reinterpret_cast<void*>(Alias(pointer)), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  ::close(found->second.fd);
  if (found->second.allocated) used -= found->second.bytes;
  mapped.erase(found);
  CountObject(-1);
  return 0;
}

int MapNew(uint64_t* pointer, size_t bytes, int fd, bool allocated) {
  if (fd < 0) return kOutOfMemory;
  *pointer = TakeRange(bytes);
  if (*pointer == 0) {
    ::close(fd);
    return kOutOfMemory;
  }
  const int result = MapFile(*pointer, bytes, fd, PROT_READ | PROT_WRITE, allocated);
  if (result != 0) GiveRangeBack(*pointer);
  return result;
}

bool Fits(size_t bytes) { return !OutOfMemory() && bytes <= ThisMachine().memory_bytes - used; }

// What a legacy handle says.
struct Legacy {
  pid_t pid;
  int fd;
  uint64_t bytes;
};
static_assert(sizeof(Legacy) <= sizeof(kernels::CudaIpcMemoryHandle));

uint64_t PageBegin(uint64_t address) { return address / kPageBytes * kPageBytes; }
uint64_t PageEnd(uint64_t address) { return PageBegin(address + kPageBytes - 1); }

}  // namespace

int Allocate(uint64_t* pointer, size_t bytes) {
  std::lock_guard lock(mu);
  return bytes > 0 && Fits(bytes) ? MapNew(pointer, bytes, MakeFile(bytes), /*allocated=*/true) : kOutOfMemory;
}

int Free(uint64_t pointer) {
  std::lock_guard lock(mu);
  const int result = UnmapFile(pointer);
  if (result == 0) GiveRangeBack(pointer);
  return result;
}

int FindAllocation(uint64_t pointer, uint64_t* base, size_t* bytes) {
  std::lock_guard lock(mu);
  const auto found = Containing(mapped, pointer, 1);
  if (found == mapped.end()) return kNotFound;
  if (base != nullptr) *base = found->first;
  if (bytes != nullptr) *bytes = found->second.bytes;
  return 0;
}

size_t UsedBytes() {
  std::lock_guard lock(mu);
  return used;
}

int ExportLegacy(uint64_t pointer, kernels::CudaIpcMemoryHandle* handle) {
  std::lock_guard lock(mu);
  const auto found = mapped.find(pointer);
  if (found == mapped.end()) return kInvalidValue;
  const Legacy content{::getpid(), found->second.fd, found->second.bytes};
  std::memcpy(handle, &content, sizeof(content));
  return 0;
}

int OpenLegacy(const kernels::CudaIpcMemoryHandle& handle, uint64_t* pointer) {
  Legacy content;
  std::memcpy(&content, &handle, sizeof(content));
  if (content.pid == ::getpid()) return kInvalidContext;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", content.pid, content.fd);
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0 || FileBytes(fd) < content.bytes || content.bytes == 0) {
    if (fd >= 0) ::close(fd);
    return kInvalidContext;
  }
  std::lock_guard lock(mu);
  return MapNew(pointer, content.bytes, fd, /*allocated=*/false);
}

int Create(kernels::CudaAllocation* allocation, size_t bytes) {
  std::lock_guard lock(mu);
  const int fd = Fits(bytes) ? MakeFile(bytes) : -1;
  if (fd < 0) return kOutOfMemory;
  *allocation = static_cast<kernels::CudaAllocation>(fd);
  created[*allocation] = bytes;
  used += bytes;
  CountObject(1);
  return 0;
}

int Import(kernels::CudaAllocation* allocation, int descriptor) {
  const int fd = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kInvalidValue;
  *allocation = static_cast<kernels::CudaAllocation>(fd);
  std::lock_guard lock(mu);
  created[*allocation] = 0;
  CountObject(1);
  return 0;
}

int Export(kernels::CudaAllocation allocation, int* descriptor) {
  *descriptor = ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0);
  return *descriptor < 0 ? kInvalidValue : 0;
}

int Release(kernels::CudaAllocation allocation) {
  std::lock_guard lock(mu);
  const auto found = created.find(allocation);
  if (found == created.end()) return kInvalidValue;
  used -= found->second;
  created.erase(found);
  CountObject(-1);
  ::close(static_cast<int>(allocation));
  return 0;
}

int Reserve(uint64_t* pointer, size_t bytes) {
  std::lock_guard lock(mu);
  *pointer = TakeRange(bytes);
  return *pointer == 0 ? kOutOfMemory : 0;
}

int Unreserve(uint64_t pointer) {
  std::lock_guard lock(mu);
  GiveRangeBack(pointer);
  return 0;
}

int Map(uint64_t pointer, size_t bytes, kernels::CudaAllocation allocation) {
  std::lock_guard lock(mu);
  const auto range = ranges.find(pointer);
  if (bytes == 0 || range == ranges.end() || bytes > range->second) return kInvalidValue;
  if (FileBytes(static_cast<int>(allocation)) < bytes) return kInvalidValue;
  return MapFile(pointer, bytes, ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0), PROT_NONE,
                 /*allocated=*/false);
}

int SetAccess(uint64_t pointer, size_t bytes) {
  return ::mprotect(reinterpret_cast<void*>(Alias(pointer)), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalidValue;
}

int Unmap(uint64_t pointer) {
  std::lock_guard lock(mu);
  return UnmapFile(pointer);
}

int Register(void* data, size_t bytes) {
  const uint64_t begin = reinterpret_cast<uint64_t>(data);
  std::lock_guard lock(mu);
  for (const auto& [other, other_bytes] : registered) {
    if (PageBegin(begin) < PageEnd(other + other_bytes) && PageBegin(other) < PageEnd(begin + bytes)) {
      return kAlreadyRegistered;
    }
  }
  registered[begin] = bytes;
  CountObject(1);
  return 0;
}

int Unregister(void* data) {
  std::lock_guard lock(mu);
  if (registered.erase(reinterpret_cast<uint64_t>(data)) != 1) return kInvalidValue;
  CountObject(-1);
  return 0;
}

int AllocateHost(void** data, size_t bytes) {
  *data = OutOfMemory() ? nullptr : std::aligned_alloc(kPageBytes, PageEnd(bytes));
  return *data == nullptr ? kOutOfMemory : Register(*data, bytes);
}

int FreeHost(void* data) {
  const int result = Unregister(data);
  if (result == 0) std::free(data);
  return result;
}

bool IsRegistered(const void* data, size_t bytes) {
  std::lock_guard lock(mu);
  return Containing(registered, reinterpret_cast<uint64_t>(data), bytes) != registered.end();
}

void* OnGpu(const void* pointer, size_t bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (InArena(address)) {
    return IsDevicePointer(address, bytes) ? reinterpret_cast<void*>(Alias(address)) : nullptr;
  }
  const bool usable = ThisMachine().pageable_access || Setting("FAKE_CUDA_HOST_IS_GPU") != 0;
  return usable || IsRegistered(pointer, bytes) ? const_cast<void*>(pointer) : nullptr;
}

bool IsDevicePointer(uint64_t pointer, size_t bytes) {
  std::lock_guard lock(mu);
  return InArena(pointer) && Containing(mapped, pointer, bytes) != mapped.end();
}

}  // namespace superoffload::fake_cuda

extern "C" uint64_t fakeCudaAlias(uint64_t pointer) {
  return superoffload::fake_cuda::InArena(pointer) ? superoffload::fake_cuda::Alias(pointer) : pointer;
}
