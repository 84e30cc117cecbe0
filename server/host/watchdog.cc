#include "server/host/watchdog.h"

#include <pthread.h>
#include <systemd/sd-daemon.h>

#include <cstdint>

namespace superoffload::host {
namespace {

// A job that does nothing but get its turn.
class Ping final : public engine::ChunkJob {
 public:
  void RunChunk(size_t, size_t) override {}
  void Done() override { done.Notify(); }
  absl::Notification done;
};

}  // namespace

Watchdog::Watchdog(engine::WorkerPool* pool) : pool_(pool) {
  uint64_t microseconds = 0;
  if (::sd_watchdog_enabled(/*unset_environment=*/1, &microseconds) <= 0) return;
  thread_ = std::thread([this, interval = absl::Microseconds(microseconds) / 3] { Run(interval); });
  pthread_setname_np(thread_.native_handle(), "so-watchdog");
}

Watchdog::~Watchdog() {
  stop_.Notify();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Run(absl::Duration interval) {
  do {
    Ping ping;
    pool_->Submit(&ping, 1);
    ping.done.WaitForNotification();
    ::sd_notify(0, "WATCHDOG=1");
  } while (!stop_.WaitForNotificationWithTimeout(interval));
}

}  // namespace superoffload::host
