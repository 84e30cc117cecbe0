#include "server/optimizer/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/memory/shared_memory.h"

namespace superoffload::optimizer {

Process FindProcess(pid_t pid) {
  Process process{pid, 0};
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  // "PID (NAME) STATE ...": the name may hold anything. The start is field 22.
  stat.ignore(std::numeric_limits<std::streamsize>::max(), '(');
  std::string rest;
  std::getline(stat, rest, '\0');
  const size_t name_end = rest.rfind(')');
  if (name_end == std::string::npos) return process;
  std::string::size_type at = name_end + 1;
  for (int field = 2; field < 21 && at != std::string::npos; ++field) at = rest.find(' ', at + 1);
  if (at != std::string::npos) process.start_time = std::strtoull(rest.c_str() + at, nullptr, 10);
  return process;
}

bool MayRun(const Process& process) {
  if (process.pid == 0) return true;
  const memory::FileDescriptor fd(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
  if (!fd.valid()) return errno != ESRCH;
  pollfd polled{fd.get(), POLLIN, 0};
  if (::poll(&polled, 1, 0) > 0) return false;  // it has ended, and nobody has waited for it yet
  const uint64_t start_time = FindProcess(process.pid).start_time;
  return start_time == 0 || process.start_time == 0 || start_time == process.start_time;
}

}  // namespace superoffload::optimizer
