// One checkpoint being taken, whoever asked for it: a call, a schedule, or the daemon's stop.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_TASK_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_TASK_H_

#include <atomic>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/checkpoint/writer.h"
#include "server/optimizer/optimizer_table.h"

namespace superoffload::checkpoint {

class Task {
 public:
  Task(optimizer::OptimizerPtr optimizer, WriteOptions options)
      : optimizer_(std::move(optimizer)), options_(std::move(options)) {}

  // Cancels, and waits for the end.
  ~Task();

  // Takes the checkpoint in the calling thread, which has the rights that the options name. Once, and not after Start.
  const optimizer::CheckpointReport& Take();

  // Takes it in a thread of its own. RESOURCE_EXHAUSTED: the kernel starts no more.
  absl::Status Start();

  // Whether what was started has ended; waits at most so long.
  bool WaitEnd(absl::Duration most) const { return end_.WaitForNotificationWithTimeout(most); }

  // After WaitEnd has said so.
  const optimizer::CheckpointReport& report() const;

  // Thread-safe. Its status is CANCELLED then, unless it was about to end.
  void Cancel();
  bool cancelled() const { return cancelled_; }

  const Progress& progress() const { return progress_; }

 private:
  const optimizer::OptimizerPtr optimizer_;
  const WriteOptions options_;
  std::atomic<bool> cancelled_{false};
  Progress progress_;
  optimizer::CheckpointReport report_;
  absl::Notification end_;
  std::thread thread_;
};

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_TASK_H_
