#include "server/host/descriptor_limit.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "server/host/log.h"

namespace superoffload::host {

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    if (limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
  }
  LogWarning(absl::StrCat("the limit of descriptors stays low (", std::strerror(errno), "); raise it with ulimit -n"));
}

transport::ConnectionLimits UsersConnectionLimits() {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  transport::ConnectionLimits limits;
  limits.total = std::clamp<size_t>(files.rlim_cur / 8, 16, limits.total);
  limits.per_user = std::min(limits.per_user, limits.total / 2);
  return limits;
}

}  // namespace superoffload::host
