// A process of this machine that can be told from a later one of the same number.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_PROCESS_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_PROCESS_H_

#include <sys/types.h>

#include <chrono>
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

// Waits until it has ended, if it is ending. A process that was killed closes its sockets before the files through
// which its GPU may still copy for it. False: it is ending still, after `limit`.
bool AwaitEnd(const Process& process, std::chrono::milliseconds limit);

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_PROCESS_H_
