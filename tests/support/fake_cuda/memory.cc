#include "tests/support/fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::fake_cuda {

using kernels::CudaAccess;
using kernels::CudaAllocation;
using kernels::CudaAllocationProperties;
using kernels::CudaPointer;

namespace {

constexpr uint64_t kGranule = uint64_t{2} << 20;
constexpr uint64_t kArenaBytes = uint64_t{1} << 34;  // and as much for their aliases

uint64_t WholeGranules(uint64_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

// Of device pointers, for the whole program.
uint64_t Arena() {
  static const uint64_t begin = [] {
    void* const data =
        ::mmap(nullptr, 2 * kArenaBytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) std::abort();
    return WholeGranules(reinterpret_cast<uint64_t>(data));
  }();
  return begin;
}
bool IsAddress(uint64_t pointer) { return pointer >= Arena() && pointer < Arena() + kArenaBytes; }

struct Taken {
  std::mutex mu;
  std::map<uint64_t, size_t> ends;  // by begin
  uint64_t cursor = Arena();
};
Taken& AllTaken() {
  static auto* const all = new Taken;
  return *all;
}

int MakeFile(size_t bytes) {
  const int fd = ::memfd_create("fake-gpu-memory", MFD_CLOEXEC);
  return fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? fd : -1;
}

size_t FileBytes(int fd) {
  struct stat file{};
  return ::fstat(fd, &file) == 0 ? static_cast<size_t>(file.st_size) : 0;
}

int Duplicate(uint64_t descriptor) { return ::fcntl(static_cast<int>(descriptor), F_DUPFD_CLOEXEC, 0); }

bool InGranules(uint64_t pointer, size_t bytes) { return bytes > 0 && (pointer | bytes) % kGranule == 0; }

}  // namespace

Memory::Memory(std::function<Machine()> machine, std::function<bool()> out_of_memory)
    : machine_(std::move(machine)), out_of_memory_(std::move(out_of_memory)) {}

Memory::~Memory() { SUPEROFFLOAD_CHECK_EQ(objects(), 0, "memory of the GPU is left"); }

Memory::PhysicalPtr Memory::MakePhysical(size_t bytes, bool exportable) {
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return {new bool(exportable), [this, bytes](const bool* physical) {
            used_ -= bytes;
            delete physical;
          }};
}

int Memory::objects() const {
  std::lock_guard lock(mu_);
  return static_cast<int>(ranges_.size() + mapped_.size() + created_.size() + registered_.size());
}

// Addresses are not used again soon, so that who uses freed memory is noticed. 0: there are none.
uint64_t Memory::TakeRange(size_t bytes) {
  bytes = WholeGranules(bytes);
  auto& [mu, ends, cursor] = AllTaken();
  std::lock_guard lock(mu);
  for (const uint64_t first : {cursor, Arena()}) {
    for (uint64_t at = first; bytes <= kArenaBytes && at + bytes <= Arena() + kArenaBytes;) {
      const auto after = ends.lower_bound(at + bytes);
      if (after == ends.begin() || std::prev(after)->second <= at) {
        ranges_[at] = {bytes};
        return cursor = ends[at] = at + bytes, at;
      }
      at = std::prev(after)->second;
    }
  }
  return 0;
}

void Memory::GiveRangeBack(uint64_t pointer) {
  if (ranges_.erase(pointer) == 0) return;
  std::lock_guard lock(AllTaken().mu);
  AllTaken().ends.erase(pointer);
}

uint64_t Memory::AliasOf(CudaPointer pointer) { return IsAddress(pointer) ? pointer + kArenaBytes : pointer; }

int Memory::MapFile(uint64_t pointer, size_t bytes, int fd, int protection, PhysicalPtr physical) {
  void* const alias = reinterpret_cast<void*>(AliasOf(pointer));
  if (::mmap(alias, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return kOutOfMemory;
  return mapped_[pointer] = {{bytes}, std::move(physical), {}}, kOk;
}

int Memory::UnmapFile(uint64_t pointer) {
  const auto found = mapped_.find(pointer);
  if (found == mapped_.end()) return kInvalidValue;
  ::mmap(reinterpret_cast<void*>(AliasOf(pointer)), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return mapped_.erase(found), kOk;
}

// The machine may have become another one, with the same contexts.
size_t Memory::ContextBytes() const { return contexts_.size() * machine_().context_bytes; }

bool Memory::IsLeft(size_t bytes) const {
  const size_t all = machine_().memory_bytes, used = used_ + ContextBytes();
  return used <= all && bytes <= all - used;
}
bool Memory::Fits(size_t bytes) const { return !out_of_memory_() && IsLeft(bytes); }

// Whether mappings cover all of it, one behind the other.
bool Memory::Covered(uint64_t pointer, size_t bytes) const {
  for (const uint64_t end = pointer + bytes; pointer < end;) {
    const auto found = Containing(mapped_, pointer, 1);
    if (found == mapped_.end()) return false;
    pointer = found->first + found->second.bytes;
  }
  return true;
}

int Memory::Allocate(CudaPointer* pointer, size_t bytes) {
  std::lock_guard lock(mu_);
  if (bytes == 0 || !Fits(bytes)) return kOutOfMemory;
  const int fd = MakeFile(bytes);
  *pointer = fd < 0 ? 0 : TakeRange(bytes);
  int result = kOutOfMemory;
  if (*pointer != 0) result = MapFile(*pointer, bytes, fd, PROT_READ | PROT_WRITE, MakePhysical(bytes));
  if (fd >= 0) ::close(fd);
  if (result != kOk) GiveRangeBack(*pointer);
  return result;
}

int Memory::Free(CudaPointer pointer) {
  std::lock_guard lock(mu_);
  const int result = UnmapFile(pointer);
  if (result == 0) GiveRangeBack(pointer);
  return result;
}

int Memory::GetInfo(size_t* free_bytes, size_t* total_bytes) const {
  *total_bytes = machine_().memory_bytes;
  return *free_bytes = *total_bytes - std::min(*total_bytes, UsedBytes()), kOk;
}
size_t Memory::UsedBytes() const {
  std::lock_guard lock(mu_);
  return used_ + ContextBytes();
}
size_t Memory::PeakBytes() const {
  std::lock_guard lock(mu_);
  return peak_ + ContextBytes();
}
void Memory::ResetPeak() {
  std::lock_guard lock(mu_);
  peak_ = used_;
}

int Memory::GetGranularity(size_t* bytes, const CudaAllocationProperties*, int) const { return *bytes = kGranule, kOk; }

int Memory::Create(CudaAllocation* allocation, size_t bytes, const CudaAllocationProperties* properties,
                   unsigned long long) {
  std::lock_guard lock(mu_);
  if (!InGranules(0, bytes)) return kInvalidValue;
  const int fd = Fits(bytes) ? MakeFile(bytes) : -1;
  if (fd < 0) return kOutOfMemory;
  *allocation = static_cast<CudaAllocation>(fd);
  return created_[*allocation] = MakePhysical(bytes, properties->handle_types != 0), kOk;
}

int Memory::Import(CudaAllocation* allocation, void* descriptor, int) {
  const int fd = Duplicate(reinterpret_cast<uintptr_t>(descriptor));
  if (fd < 0) return kInvalidValue;
  *allocation = static_cast<CudaAllocation>(fd);
  std::lock_guard lock(mu_);
  return created_[*allocation] = MakePhysical(0), kOk;
}

int Memory::Export(void* descriptor, CudaAllocation allocation, int, unsigned long long) const {
  std::lock_guard lock(mu_);
  const auto found = created_.find(allocation);
  if (found == created_.end() || !*found->second) return kInvalidValue;
  const int fd = Duplicate(allocation);
  return *static_cast<int*>(descriptor) = fd, fd < 0 ? kInvalidValue : kOk;
}

int Memory::Release(CudaAllocation allocation) {
  std::lock_guard lock(mu_);
  if (created_.erase(allocation) != 1) return kInvalidValue;
  return ::close(static_cast<int>(allocation)), kOk;
}

int Memory::Reserve(CudaPointer* pointer, size_t bytes, size_t, CudaPointer, unsigned long long) {
  std::lock_guard lock(mu_);
  if (!InGranules(0, bytes)) return kInvalidValue;
  *pointer = TakeRange(bytes);
  return *pointer == 0 ? kOutOfMemory : kOk;
}

int Memory::Unreserve(CudaPointer pointer, size_t bytes) {
  std::lock_guard lock(mu_);
  const auto found = ranges_.find(pointer);
  if (found == ranges_.end() || found->second.bytes != bytes || Touches(mapped_, pointer, bytes)) return kInvalidValue;
  return GiveRangeBack(pointer), kOk;
}

int Memory::Map(CudaPointer pointer, size_t bytes, size_t, CudaAllocation allocation, unsigned long long) {
  std::lock_guard lock(mu_);
  const auto handle = created_.find(allocation);
  if (handle == created_.end() || !InGranules(pointer, bytes)) return kInvalidValue;
  if (Containing(ranges_, pointer, bytes) == ranges_.end() || Touches(mapped_, pointer, bytes)) return kInvalidValue;
  if (FileBytes(static_cast<int>(allocation)) < bytes) return kInvalidValue;
  return MapFile(pointer, bytes, static_cast<int>(allocation), PROT_NONE, handle->second);
}

int Memory::SetAccess(CudaPointer pointer, size_t bytes, const CudaAccess* accesses, size_t count) {
  std::lock_guard lock(mu_);
  std::set<int> devices;
  for (size_t i = 0; i < count; ++i) devices.insert(accesses[i].location.id);
  const auto gpus = static_cast<int>(machine_().uuids.size());
  if (count > 0 && (*devices.begin() < 0 || *devices.rbegin() >= gpus)) return kInvalidDevice;
  if (!InGranules(pointer, bytes) || !Covered(pointer, bytes)) return kInvalidValue;
  for (auto it = mapped_.lower_bound(pointer); it != mapped_.end() && it->first < pointer + bytes; ++it) {
    it->second.accessors.insert(devices.begin(), devices.end());
  }
  return ::mprotect(reinterpret_cast<void*>(AliasOf(pointer)), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalidValue;
}

std::set<int> Memory::Accessors(CudaPointer pointer) const {
  std::lock_guard lock(mu_);
  const auto found = Containing(mapped_, pointer, 1);
  return found == mapped_.end() ? std::set<int>() : found->second.accessors;
}

int Memory::Unmap(CudaPointer pointer, size_t bytes) {
  std::lock_guard lock(mu_);
  const auto found = mapped_.find(pointer);
  return found == mapped_.end() || found->second.bytes != bytes ? kInvalidValue : UnmapFile(pointer);
}

int Memory::TakeContext(int device) {
  std::lock_guard lock(mu_);
  if (!IsLeft(machine_().context_bytes)) return kOutOfMemory;
  contexts_.insert(device);
  return 0;
}

void Memory::GiveContextBack(int device) {
  std::lock_guard lock(mu_);
  contexts_.erase(device);
}

void* Memory::OnGpu(const void* pointer, size_t bytes) const {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (IsAddress(address)) {
    return IsDevicePointer(address, bytes) ? reinterpret_cast<void*>(AliasOf(address)) : nullptr;
  }
  const Machine machine = machine_();
  const bool usable = machine.pageable_access || machine.host_is_gpu;
  return usable || IsPinned(pointer, bytes) == Pinned::kAll ? const_cast<void*>(pointer) : nullptr;
}

bool Memory::IsDevicePointer(CudaPointer pointer, size_t bytes) const {
  std::lock_guard lock(mu_);
  return IsAddress(pointer) && Covered(pointer, std::max(bytes, size_t{1}));
}

}  // namespace superoffload::fake_cuda
