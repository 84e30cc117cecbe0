// The host's half of Memory: what is registered, and what the driver allocates.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/memory.h"

namespace superoffload::fake_cuda {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t PageBegin(uint64_t address) { return address / kPageBytes * kPageBytes; }
uint64_t PageEnd(uint64_t address) { return PageBegin(address + kPageBytes - 1); }

// Whether something is mapped at all of its pages.
bool Exists(uint64_t begin, size_t bytes) {
  const size_t pages = (PageEnd(begin + bytes) - PageBegin(begin)) / kPageBytes;
  std::vector<unsigned char> resident(pages);
  return ::mincore(reinterpret_cast<void*>(PageBegin(begin)), pages * kPageBytes, resident.data()) == 0;
}

}  // namespace

// The ranges that have pages in common with this one.
bool Memory::AnyRegistered(uint64_t begin, size_t bytes) const {
  return std::ranges::any_of(registered_, [=](const auto& other) {
    return PageBegin(begin) < PageEnd(other.first + other.second.bytes) &&
           PageBegin(other.first) < PageEnd(begin + bytes);
  });
}

int Memory::RegisterAs(uint64_t begin, size_t bytes, bool allocated) {
  if (begin == 0 || bytes == 0 || !Exists(begin, bytes)) return kInvalidValue;
  if (AnyRegistered(begin, bytes)) return kAlreadyRegistered;
  const size_t pages = (PageEnd(begin + bytes) - PageBegin(begin)) / kPageBytes;
  const size_t cost = machine_().register_cost;
  if (!IsLeft(pages * cost)) return kOutOfMemory;
  registered_[begin] = {bytes, allocated, MakePhysical(pages * cost)};
  return 0;
}

// False: there is none of this kind.
bool Memory::Forget(void* data, bool allocated) {
  const auto found = registered_.find(reinterpret_cast<uint64_t>(data));
  if (found == registered_.end() || found->second.allocated != allocated) return false;
  registered_.erase(found);
  return true;
}

int Memory::Register(void* data, size_t bytes) {
  std::lock_guard lock(mu_);
  return RegisterAs(reinterpret_cast<uint64_t>(data), bytes, false);
}

int Memory::Unregister(void* data) {
  std::lock_guard lock(mu_);
  return Forget(data, false) ? 0 : kNotRegistered;
}

int Memory::AllocateHost(void** data, size_t bytes) {
  *data = out_of_memory_() ? nullptr : std::aligned_alloc(kPageBytes, PageEnd(bytes));
  if (*data == nullptr) return kOutOfMemory;
  std::lock_guard lock(mu_);
  const int result = RegisterAs(reinterpret_cast<uint64_t>(*data), bytes, true);
  if (result != 0) std::free(std::exchange(*data, nullptr));
  return result;
}

int Memory::FreeHost(void* data) {
  std::lock_guard lock(mu_);
  if (!Forget(data, true)) return kInvalidValue;
  std::free(data);
  return 0;
}

Memory::Pinned Memory::IsPinned(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uint64_t>(data);
  std::lock_guard lock(mu_);
  if (Containing(registered_, begin, bytes) != registered_.end()) return Pinned::kAll;
  const auto after = registered_.lower_bound(begin + bytes);
  const bool touched = after != registered_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > begin;
  return touched ? Pinned::kInPart : Pinned::kNone;
}

}  // namespace superoffload::fake_cuda
