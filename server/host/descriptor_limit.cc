#include "server/host/descriptor_limit.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/host/log.h"

namespace superoffload::host {
namespace {

constexpr size_t kDescriptorsPerDescriptorConnection = 2;  // that of its process as well
constexpr size_t kDescriptorsPerControlConnection = 3;     // connection_relay.h
constexpr size_t kMoreControlConnections = 16;

constexpr size_t kDescriptorsPerOptimizer = 6;

// Libraries, listeners, checkpoints under way.
constexpr size_t kOtherDescriptors = 128;

size_t Limit() {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  return files.rlim_cur;
}

}  // namespace

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    if (limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
  }
  LogWarning(absl::StrCat("the limit of descriptors stays low (", std::strerror(errno), "); raise it with ulimit -n"));
}

transport::ConnectionLimits DescriptorConnectionLimits() {
  transport::ConnectionLimits limits;
  limits.total = std::clamp<size_t>(Limit() / 16, 16, limits.total);
  limits.per_user = std::min(limits.per_user, limits.total / 4);
  return limits;
}

transport::ConnectionLimits ControlConnectionLimits() {
  transport::ConnectionLimits limits = DescriptorConnectionLimits();
  limits.per_user += kMoreControlConnections;
  limits.total += 2 * kMoreControlConnections;
  return limits;
}

size_t MostOptimizers() {
  const size_t others = DescriptorConnectionLimits().total * kDescriptorsPerDescriptorConnection +
                        ControlConnectionLimits().total * kDescriptorsPerControlConnection + kOtherDescriptors;
  return std::max<size_t>(1, (std::max(Limit(), others) - others) / kDescriptorsPerOptimizer);
}

}  // namespace superoffload::host
