#include "tests/support/fake_cuda/addresses.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

namespace superoffload::fake_cuda {
namespace {

constexpr uint64_t kArenaBytes = uint64_t{1} << 34;  // and as much for their aliases
constexpr uint64_t kBlockBytes = uint64_t{2} << 20;

uint64_t Arena() {
  static const uint64_t begin = [] {
    void* const data =
        ::mmap(nullptr, 2 * kArenaBytes + kBlockBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) std::abort();
    return (reinterpret_cast<uint64_t>(data) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  }();
  return begin;
}

struct Taken {
  std::mutex mu;
  std::map<uint64_t, size_t> ranges;
  uint64_t cursor = 0;
};
Taken& AllTaken() {
  static auto* const all = new Taken;
  return *all;
}

}  // namespace

size_t RangeBytes(size_t bytes) { return std::max((bytes + kBlockBytes - 1) / kBlockBytes, uint64_t{1}) * kBlockBytes; }

uint64_t TakeAddresses(size_t bytes) {
  bytes = RangeBytes(bytes);
  auto& [mu, ranges, cursor] = AllTaken();
  std::lock_guard lock(mu);
  for (const uint64_t first : {std::max(cursor, Arena()), Arena()}) {
    for (uint64_t at = first; bytes <= kArenaBytes && at + bytes <= Arena() + kArenaBytes;) {
      const auto after = ranges.lower_bound(at + bytes);
      if (after == ranges.begin() || std::prev(after)->first + std::prev(after)->second <= at) {
        ranges[at] = bytes;
        return cursor = at + bytes, at;
      }
      at = std::prev(after)->first + std::prev(after)->second;
    }
  }
  return 0;
}

void GiveAddressesBack(uint64_t begin) {
  std::lock_guard lock(AllTaken().mu);
  AllTaken().ranges.erase(begin);
}

uint64_t AliasOf(uint64_t pointer) { return pointer + kArenaBytes; }
bool IsAddress(uint64_t pointer) { return pointer >= Arena() && pointer < Arena() + kArenaBytes; }

}  // namespace superoffload::fake_cuda
