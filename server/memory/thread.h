// Threads, of which a process may have only so many.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_THREAD_H_
#define SUPEROFFLOAD_SERVER_MEMORY_THREAD_H_

#include <functional>
#include <thread>

#include "absl/status/statusor.h"

namespace superoffload::memory {

// Runs `run` in a new thread that `name`, of at most 15 characters, names. RESOURCE_EXHAUSTED: the kernel starts no
// more.
absl::StatusOr<std::thread> StartThread(const char* name, std::function<void()> run);

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_THREAD_H_
