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
namespace {

// Of /proc/PID/stat, counted from 1 as in proc(5).
constexpr int kFlagsField = 9, kStartTimeField = 22;
constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel's sched.h

// 0 where /proc does not tell.
uint64_t StatField(pid_t pid, int field) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  // "PID (NAME) STATE ...": the name may hold anything.
  stat.ignore(std::numeric_limits<std::streamsize>::max(), '(');
  std::string rest;
  std::getline(stat, rest, '\0');
  const size_t name_end = rest.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::string::size_type at = name_end + 1;
  for (int before = 2; before < field - 1 && at != std::string::npos; ++before) at = rest.find(' ', at + 1);
  return at == std::string::npos ? 0 : std::strtoull(rest.c_str() + at, nullptr, 10);
}

// Invalid with errno ESRCH: there is no such process.
memory::FileDescriptor OpenProcess(pid_t pid) {
  return memory::FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// All its threads, and everything that was open.
bool HasEnded(const memory::FileDescriptor& process, std::chrono::milliseconds limit) {
  pollfd polled{process.get(), POLLIN, 0};
  return ::poll(&polled, 1, static_cast<int>(limit.count())) > 0;
}

}  // namespace

Process FindProcess(pid_t pid) { return {pid, StatField(pid, kStartTimeField)}; }

bool MayRun(const Process& process) {
  if (process.pid == 0) return true;
  const memory::FileDescriptor fd = OpenProcess(process.pid);
  if (!fd.valid()) return errno != ESRCH;
  if (HasEnded(fd, std::chrono::milliseconds(0))) return false;  // and nobody has waited for it yet
  const uint64_t start_time = FindProcess(process.pid).start_time;
  return start_time == 0 || process.start_time == 0 || start_time == process.start_time;
}

bool AwaitEnd(const Process& process, std::chrono::milliseconds limit) {
  if (process.pid == 0) return true;
  const memory::FileDescriptor fd = OpenProcess(process.pid);
  if (!fd.valid() || FindProcess(process.pid) != process) return true;
  const bool ends = (StatField(process.pid, kFlagsField) & kExiting) != 0;
  return !ends || HasEnded(fd, limit);
}

}  // namespace superoffload::optimizer
