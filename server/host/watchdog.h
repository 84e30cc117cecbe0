// Tells the service manager that the daemon is alive, as long as its workers do what they are given.
#ifndef SUPEROFFLOAD_SERVER_HOST_WATCHDOG_H_
#define SUPEROFFLOAD_SERVER_HOST_WATCHDOG_H_

#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/engine/worker_pool.h"

namespace superoffload::host {

class Watchdog {
 public:
  // Does nothing when the service manager asked for no signs of life.
  explicit Watchdog(engine::WorkerPool* pool);
  ~Watchdog();

 private:
  void Run(absl::Duration interval);

  engine::WorkerPool* const pool_;
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_WATCHDOG_H_
