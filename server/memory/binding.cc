#include "server/memory/binding.h"

#include <numaif.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace superoffload::memory {
namespace {

constexpr unsigned kMaxNodes = 1024;
constexpr size_t kMaxSamples = 16384;

}  // namespace

absl::Status BindToNode(void* data, size_t bytes, unsigned node) {
  constexpr unsigned kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMaxNodes / kWordBits> mask{};
  if (node >= kMaxNodes) return absl::InvalidArgumentError(absl::StrCat("NUMA node ", node, " is out of range"));
  mask[node / kWordBits] |= 1ul << (node % kWordBits);
  // The kernel reads one bit less than it is told of.
  if (::mbind(data, bytes, MPOL_BIND, mask.data(), kMaxNodes, MPOL_MF_STRICT) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("cannot bind memory to NUMA node ", node, ": ",
                                                    std::strerror(errno), "; check the cpuset of the service"));
}

std::map<int, uint64_t> BytesByNode(const void* data, size_t bytes) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t pages = bytes / page;
  if (pages == 0) return {};
  const size_t samples = std::min(pages, kMaxSamples);
  std::vector<void*> addresses;
  for (size_t i = 0; i < samples; ++i) {
    addresses.push_back(static_cast<char*>(const_cast<void*>(data)) + pages * i / samples * page);
  }
  std::vector<int> nodes(samples);
  if (::move_pages(0, samples, addresses.data(), nullptr, nodes.data(), 0) != 0) return {};
  std::map<int, uint64_t> by_node;
  for (const int node : nodes) {
    if (node >= 0) by_node[node] += bytes / samples;
  }
  return by_node;
}

absl::Status CheckNode(const std::map<int, uint64_t>& bytes_by_node, unsigned node) {
  for (const auto& [other, bytes] : bytes_by_node) {
    if (other == static_cast<int>(node)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("about ", bytes, " bytes lie on NUMA node ", other, " instead of node ", node,
                     "; free memory there, or set misplaced_memory to MISPLACED_MEMORY_WARN"));
  }
  return absl::OkStatus();
}

}  // namespace superoffload::memory
