// A process of this machine that can be told from a later one of the same number.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_PROCESS_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>

namespace superoffload::optimizer {

struct Process {
  pid_t pid = 0;            // 0: not known, as of a process of another PID name space
  uint64_t start_time = 0;  // clock ticks after boot; 0 where /proc does not tell

  bool operator==(const Process&) const = default;
};

// The process that has this number now.
Process FindProcess(pid_t pid);

// Whether it runs. An unknown one may.
bool MayRun(const Process& process);

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_PROCESS_H_
