#include "tests/support/fake_cuda/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/check.h"
#include "tests/support/fake_cuda/addresses.h"

namespace superoffload::fake_cuda {
namespace {

int MakeFile(size_t bytes) {
  const int fd = ::memfd_create("fake-gpu-memory", MFD_CLOEXEC);
  return fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? fd : -1;
}

size_t FileBytes(int fd) {
  struct stat file{};
  return ::fstat(fd, &file) == 0 ? static_cast<size_t>(file.st_size) : 0;
}

bool InGranules(uint64_t pointer, size_t bytes) {
  return bytes > 0 && pointer % Memory::kGranularity == 0 && bytes % Memory::kGranularity == 0;
}

}  // namespace

Memory::Physical::Physical(Usage* usage_given, size_t bytes_given, bool exportable_given)
    : usage(usage_given), bytes(bytes_given), exportable(exportable_given) {
  usage->now += bytes;
  usage->peak = std::max(usage->peak, usage->now);
}
Memory::Physical::~Physical() { usage->now -= bytes; }

Memory::Memory(std::function<Machine()> machine, std::function<bool()> out_of_memory)
    : machine_(std::move(machine)), out_of_memory_(std::move(out_of_memory)) {}

Memory::~Memory() { SUPEROFFLOAD_CHECK_EQ(objects(), 0, "memory of the GPU is left"); }

Memory::PhysicalPtr Memory::MakePhysical(size_t bytes, bool exportable) {
  return std::make_shared<Physical>(&usage_, bytes, exportable);
}

int Memory::objects() const {
  std::lock_guard lock(mu_);
  return static_cast<int>(ranges_.size() + mapped_.size() + created_.size() + registered_.size());
}

uint64_t Memory::TakeRange(size_t bytes) {
  const uint64_t begin = TakeAddresses(bytes);
  if (begin != 0) ranges_[begin] = RangeBytes(bytes);
  return begin;
}

void Memory::GiveRangeBack(uint64_t pointer) {
  if (ranges_.erase(pointer) == 1) GiveAddressesBack(pointer);
}

// Takes the descriptor over.
int Memory::MapFile(uint64_t pointer, size_t bytes, int fd, int protection, PhysicalPtr physical) {
  if (::mmap(reinterpret_cast<void*>(AliasOf(pointer)), bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) ==
      MAP_FAILED) {
    ::close(fd);
    return kOutOfMemory;
  }
  mapped_[pointer] = {bytes, fd, std::move(physical), {}};
  return 0;
}

int Memory::UnmapFile(uint64_t pointer) {
  const auto found = mapped_.find(pointer);
  if (found == mapped_.end()) return kInvalidValue;
  ::mmap(reinterpret_cast<void*>(AliasOf(pointer)), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  ::close(found->second.fd);
  mapped_.erase(found);
  return 0;
}

// The machine may have become another one, with the same contexts.
size_t Memory::Used() const { return usage_.now + contexts_.size() * machine_().context_bytes; }

bool Memory::IsLeft(size_t bytes) const {
  const size_t all = machine_().memory_bytes, used = Used();
  return used <= all && bytes <= all - used;
}
bool Memory::Fits(size_t bytes) const { return !out_of_memory_() && IsLeft(bytes); }

bool Memory::AnyMapped(uint64_t pointer, size_t bytes) const {
  const auto after = mapped_.lower_bound(pointer + bytes);
  return after != mapped_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > pointer;
}

// Whether mappings cover all of it, one behind the other.
bool Memory::Covered(uint64_t pointer, size_t bytes) const {
  const uint64_t end = pointer + bytes;
  while (true) {
    const auto found = Containing(mapped_, pointer, 1);
    if (found == mapped_.end()) return false;
    pointer = found->first + found->second.bytes;
    if (pointer >= end) return true;
  }
}

int Memory::Allocate(uint64_t* pointer, size_t bytes) {
  std::lock_guard lock(mu_);
  if (bytes == 0 || !Fits(bytes)) return kOutOfMemory;
  const int fd = MakeFile(bytes);
  *pointer = fd < 0 ? 0 : TakeRange(bytes);
  if (*pointer == 0) {
    if (fd >= 0) ::close(fd);
    return kOutOfMemory;
  }
  const int result = MapFile(*pointer, bytes, fd, PROT_READ | PROT_WRITE, MakePhysical(bytes));
  if (result != 0) GiveRangeBack(*pointer);
  return result;
}

int Memory::Free(uint64_t pointer) {
  std::lock_guard lock(mu_);
  const int result = UnmapFile(pointer);
  if (result == 0) GiveRangeBack(pointer);
  return result;
}

size_t Memory::UsedBytes() const {
  std::lock_guard lock(mu_);
  return Used();
}
size_t Memory::PeakBytes() const {
  std::lock_guard lock(mu_);
  return usage_.peak + contexts_.size() * machine_().context_bytes;
}
void Memory::ResetPeak() {
  std::lock_guard lock(mu_);
  usage_.peak = usage_.now;
}

int Memory::Create(kernels::CudaAllocation* allocation, size_t bytes, bool exportable) {
  std::lock_guard lock(mu_);
  if (!InGranules(0, bytes)) return kInvalidValue;
  const int fd = Fits(bytes) ? MakeFile(bytes) : -1;
  if (fd < 0) return kOutOfMemory;
  *allocation = static_cast<kernels::CudaAllocation>(fd);
  created_[*allocation] = MakePhysical(bytes, exportable);
  return 0;
}

int Memory::Import(kernels::CudaAllocation* allocation, int descriptor) {
  const int fd = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kInvalidValue;
  *allocation = static_cast<kernels::CudaAllocation>(fd);
  std::lock_guard lock(mu_);
  created_[*allocation] = MakePhysical(0);
  return 0;
}

int Memory::Export(kernels::CudaAllocation allocation, int* descriptor) const {
  std::lock_guard lock(mu_);
  const auto found = created_.find(allocation);
  if (found == created_.end() || !found->second->exportable) return kInvalidValue;
  *descriptor = ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0);
  return *descriptor < 0 ? kInvalidValue : 0;
}

int Memory::Release(kernels::CudaAllocation allocation) {
  std::lock_guard lock(mu_);
  if (created_.erase(allocation) != 1) return kInvalidValue;
  ::close(static_cast<int>(allocation));
  return 0;
}

int Memory::Reserve(uint64_t* pointer, size_t bytes) {
  std::lock_guard lock(mu_);
  if (!InGranules(0, bytes)) return kInvalidValue;
  *pointer = TakeRange(bytes);
  return *pointer == 0 ? kOutOfMemory : 0;
}

int Memory::Unreserve(uint64_t pointer, size_t bytes) {
  std::lock_guard lock(mu_);
  const auto found = ranges_.find(pointer);
  if (found == ranges_.end() || found->second != bytes || AnyMapped(pointer, bytes)) return kInvalidValue;
  GiveRangeBack(pointer);
  return 0;
}

int Memory::Map(uint64_t pointer, size_t bytes, kernels::CudaAllocation allocation) {
  std::lock_guard lock(mu_);
  const auto handle = created_.find(allocation);
  if (handle == created_.end() || !InGranules(pointer, bytes)) return kInvalidValue;
  if (Containing(ranges_, pointer, bytes) == ranges_.end() || AnyMapped(pointer, bytes)) return kInvalidValue;
  if (FileBytes(static_cast<int>(allocation)) < bytes) return kInvalidValue;
  return MapFile(pointer, bytes, ::fcntl(static_cast<int>(allocation), F_DUPFD_CLOEXEC, 0), PROT_NONE, handle->second);
}

int Memory::SetAccess(uint64_t pointer, size_t bytes, const std::vector<int>& devices) {
  std::lock_guard lock(mu_);
  const auto gpus = static_cast<int>(machine_().uuids.size());
  for (const int device : devices) {
    if (device < 0 || device >= gpus) return kInvalidDevice;
  }
  if (!InGranules(pointer, bytes) || !Covered(pointer, bytes)) return kInvalidValue;
  for (auto it = mapped_.lower_bound(pointer); it != mapped_.end() && it->first < pointer + bytes; ++it) {
    for (const int device : devices) {
      std::vector<int>& accessors = it->second.accessors;
      if (std::ranges::find(accessors, device) == accessors.end()) accessors.push_back(device);
    }
  }
  return ::mprotect(reinterpret_cast<void*>(AliasOf(pointer)), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : kInvalidValue;
}

std::vector<int> Memory::Accessors(uint64_t pointer) const {
  std::lock_guard lock(mu_);
  const auto found = Containing(mapped_, pointer, 1);
  return found == mapped_.end() ? std::vector<int>() : found->second.accessors;
}

int Memory::Unmap(uint64_t pointer, size_t bytes) {
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

bool Memory::IsDevicePointer(uint64_t pointer, size_t bytes) const {
  std::lock_guard lock(mu_);
  return IsAddress(pointer) && Covered(pointer, std::max(bytes, size_t{1}));
}

}  // namespace superoffload::fake_cuda
