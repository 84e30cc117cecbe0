#include "server/optimizer/step_report_hub.h"

#include <utility>

namespace superoffload::optimizer {

std::optional<WatchedStep> StepReportHub::Watch::Next() {
  absl::MutexLock lock(&mu_);
  if (queue_.empty()) {
    waiting_ = true;
    return std::nullopt;
  }
  WatchedStep step = std::move(queue_.front());
  queue_.pop_front();
  step.dropped_reports = dropped_;
  return step;
}

std::shared_ptr<StepReportHub::Watch> StepReportHub::Add(std::function<bool(const OptimizerId&)> filter,
                                                         std::function<void()> on_report) {
  auto watch = std::make_shared<Watch>();
  watch->filter_ = std::move(filter);
  watch->on_report_ = std::move(on_report);
  absl::MutexLock lock(&mu_);
  watches_.push_back(watch);
  return watch;
}

void StepReportHub::OnStep(const OptimizerId& id, const engine::StepReport& report) {
  absl::MutexLock lock(&mu_);
  std::erase_if(watches_, [](const std::weak_ptr<Watch>& watch) { return watch.expired(); });
  for (const std::weak_ptr<Watch>& weak : watches_) {
    const std::shared_ptr<Watch> watch = weak.lock();
    if (watch == nullptr || !watch->filter_(id)) continue;
    bool notify = false;
    {
      absl::MutexLock watch_lock(&watch->mu_);
      if (watch->queue_.size() == Watch::kMaxQueued) {
        watch->queue_.pop_front();
        ++watch->dropped_;
      }
      watch->queue_.push_back(WatchedStep{id, report, 0});
      notify = std::exchange(watch->waiting_, false);
    }
    if (notify) watch->on_report_();
  }
}

}  // namespace superoffload::optimizer
