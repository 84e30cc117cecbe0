// The rest of a call, in a thread of its own.
#ifndef SUPEROFFLOAD_SERVER_RPC_CALL_THREAD_H_
#define SUPEROFFLOAD_SERVER_RPC_CALL_THREAD_H_

#include <functional>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/memory/thread.h"

namespace superoffload::rpc {

// `rest` may wait for memory, files and locks, and ends with the reactor's Finish() or StartWrite(). After that it may
// touch nothing of the call: gRPC may have ended and destroyed it. RESOURCE_EXHAUSTED: the kernel starts no more
// threads.
inline absl::Status StartCallThread(std::function<void()> rest) {
  absl::StatusOr<std::thread> thread = memory::StartThread("so-call", std::move(rest));
  if (thread.ok()) thread->detach();  // the server's shutdown waits for the call
  return thread.status();
}

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_CALL_THREAD_H_
