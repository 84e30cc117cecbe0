// What is told of optimizers, passed on to metrics, watchers, schedules and the log.
#ifndef SUPEROFFLOAD_SERVER_HOST_OBSERVERS_H_
#define SUPEROFFLOAD_SERVER_HOST_OBSERVERS_H_

#include "server/checkpoint/scheduler.h"
#include "server/host/stop_checkpoints.h"
#include "server/metrics/metrics.h"
#include "server/optimizer/optimizer_observer.h"
#include "server/optimizer/step_report_hub.h"

namespace superoffload::host {

// One event for several listeners.
class Observers final : public optimizer::OptimizerObserver {
 public:
  Observers(metrics::Metrics* metrics, optimizer::StepReportHub* hub, checkpoint::Scheduler* scheduler,
            const StopCheckpoints* stop_checkpoints)
      : metrics_(metrics), hub_(hub), scheduler_(scheduler), stop_checkpoints_(stop_checkpoints) {}
  void OnPass(const optimizer::OptimizerId& id, const engine::PassReport& report) override;
  void OnStep(const optimizer::OptimizerId& id, const engine::StepReport& report) override;
  void OnCheckpoint(const optimizer::OptimizerId& id, const optimizer::CheckpointReport& report) override;
  void OnHost(const optimizer::OptimizerId& id, const std::string& unique_id, const engine::RunMember& member) override;
  void OnDelete(const optimizer::OptimizerId& id) override;

 private:
  metrics::Metrics* const metrics_;
  optimizer::StepReportHub* const hub_;
  checkpoint::Scheduler* const scheduler_;
  const StopCheckpoints* const stop_checkpoints_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_OBSERVERS_H_
