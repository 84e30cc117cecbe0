#include "server/memory/thread.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::memory {

absl::StatusOr<std::thread> StartThread(const char* name, std::function<void()> run) {
  try {
    std::thread thread(std::move(run));
    ::pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {  // the library tells it in no other way
    return absl::ResourceExhaustedError(absl::StrCat("the daemon cannot start a thread (", error.what(),
                                                     "); end other processes, or raise its limit of processes and "
                                                     "threads (LimitNPROC=, TasksMax=, pids.max)"));
  }
}

}  // namespace superoffload::memory
