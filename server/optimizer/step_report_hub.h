// Hands step reports to watchers, each of which may be slow without delaying a step.
#ifndef SUPEROFFLOAD_SERVER_OPTIMIZER_STEP_REPORT_HUB_H_
#define SUPEROFFLOAD_SERVER_OPTIMIZER_STEP_REPORT_HUB_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/optimizer/optimizer_observer.h"

namespace superoffload::optimizer {

struct WatchedStep {
  OptimizerId id;
  engine::StepReport report;
  uint64_t dropped_reports = 0;  // lost by this watcher so far
};

// Thread-safe.
class StepReportHub final : public OptimizerObserver {
 public:
  // A watcher's bounded queue.
  class Watch {
   public:
    // The next report, or nothing; then `on_report` will be called once, when one is there.
    std::optional<WatchedStep> Next();

   private:
    friend class StepReportHub;
    static constexpr size_t kMaxQueued = 1024;

    std::function<bool(const OptimizerId&)> filter_;
    std::function<void()> on_report_;
    absl::Mutex mu_;
    std::deque<WatchedStep> queue_ ABSL_GUARDED_BY(mu_);
    uint64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
    bool waiting_ ABSL_GUARDED_BY(mu_) = false;
  };

  // Reports that pass `filter` queue up until the watch is destroyed. `on_report` must not block and not destroy the
  // watch. Shared between the watcher and a report being delivered.
  std::shared_ptr<Watch> Add(std::function<bool(const OptimizerId&)> filter, std::function<void()> on_report);

  void OnPass(const OptimizerId&, const engine::PassReport&) override {}
  void OnStep(const OptimizerId& id, const engine::StepReport& report) override;
  void OnCheckpoint(const OptimizerId&, const CheckpointReport&) override {}
  void OnDelete(const OptimizerId&) override {}

 private:
  absl::Mutex mu_;
  std::vector<std::weak_ptr<Watch>> watches_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::optimizer

#endif  // SUPEROFFLOAD_SERVER_OPTIMIZER_STEP_REPORT_HUB_H_
