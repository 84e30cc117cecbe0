#include "server/memory/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace superoffload::memory {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// "max", and a file that is not there, limit nothing.
uint64_t ReadLimit(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  uint64_t bytes = 0;
  return file >> text && absl::SimpleAtoi(text, &bytes) ? bytes : kUnlimited;
}

// Of a group and of all above it. In a container the path may name groups outside of what is mounted: those have no
// files, and the mount's own root has the container's limit.
uint64_t LeastUpwards(const std::string& mount, std::string group, const std::vector<std::string>& files) {
  uint64_t least = kUnlimited;
  while (true) {
    for (const std::string& file : files) least = std::min(least, ReadLimit(absl::StrCat(mount, group, "/", file)));
    const size_t slash = group.rfind('/');
    if (slash == std::string::npos) return least;
    group.resize(slash);
  }
}

}  // namespace

uint64_t ControlGroupLimitBytes(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  uint64_t least = kUnlimited;
  for (std::string line; std::getline(groups, line);) {
    // hierarchy:controllers:path
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (fields[1].empty()) {
      least = std::min(least, LeastUpwards(root + "/sys/fs/cgroup", fields[2], {"memory.max", "memory.high"}));
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      least = std::min(least, LeastUpwards(root + "/sys/fs/cgroup/memory", fields[2], {"memory.limit_in_bytes"}));
    }
  }
  return least;
}

uint64_t MemoryLimitBytes() {
  const uint64_t machine_bytes =
      static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return std::min(machine_bytes, ControlGroupLimitBytes());
}

uint64_t BudgetBytes(uint64_t configured_bytes, uint64_t limit_bytes) {
  return configured_bytes == 0 ? limit_bytes / 10 * 8 : std::min(configured_bytes, limit_bytes);
}

}  // namespace superoffload::memory
