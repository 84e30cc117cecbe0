// The host's half of Memory: what is registered, and what the driver allocates.
#include <sys/mman.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/memory.h"

namespace superoffload::fake_cuda {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t PageBegin(uint64_t address) { return address / kPageBytes * kPageBytes; }
uint64_t PageEnd(uint64_t address) { return PageBegin(address + kPageBytes - 1); }

}  // namespace

int Memory::RegisterAs(void* data, size_t bytes, bool allocated) {
  const auto at = reinterpret_cast<uint64_t>(data), begin = PageBegin(at), end = PageEnd(at + bytes);
  std::vector<unsigned char> resident((end - begin) / kPageBytes);
  const bool exists = ::mincore(reinterpret_cast<void*>(begin), end - begin, resident.data()) == 0;
  if (at == 0 || bytes == 0 || !exists) return kInvalidValue;
  for (const auto& [other, host] : registered_) {
    if (begin < PageEnd(other + host.bytes) && PageBegin(other) < end) return kAlreadyRegistered;
  }
  const size_t cost = resident.size() * machine_().register_cost;
  if (!IsLeft(cost)) return kOutOfMemory;
  return registered_[at] = {{bytes}, allocated, MakePhysical(cost)}, kOk;
}

// False: there is none of this kind.
bool Memory::Forget(void* data, bool allocated) {
  const auto found = registered_.find(reinterpret_cast<uint64_t>(data));
  if (found == registered_.end() || found->second.allocated != allocated) return false;
  registered_.erase(found);
  return true;
}

int Memory::Register(void* data, size_t bytes, unsigned) {
  std::lock_guard lock(mu_);
  return RegisterAs(data, bytes, false);
}

int Memory::Unregister(void* data) {
  std::lock_guard lock(mu_);
  return Forget(data, false) ? 0 : kNotRegistered;
}

int Memory::AllocateHost(void** data, size_t bytes, unsigned) {
  *data = out_of_memory_() ? nullptr : std::aligned_alloc(kPageBytes, PageEnd(bytes));
  if (*data == nullptr) return kOutOfMemory;
  std::lock_guard lock(mu_);
  const int result = RegisterAs(*data, bytes, true);
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
  return Touches(registered_, begin, bytes) ? Pinned::kInPart : Pinned::kNone;
}

}  // namespace superoffload::fake_cuda
