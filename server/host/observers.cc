#include "server/host/observers.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "server/host/log.h"

namespace superoffload::host {
namespace {

const char* VerdictText(engine::Verdict verdict) {
  switch (verdict) {
    case engine::Verdict::kSkipNonFinite:
      return "a gradient is infinite or NaN";
    case engine::Verdict::kSkipOverflow:
      return "the gradient norm would overflow the second moment";
    default:
      return "the trainer abandoned it";
  }
}

}  // namespace

void Observers::OnPass(const optimizer::OptimizerId& id, const engine::PassReport& report) {
  metrics_->OnPass(id, report);
}

void Observers::OnStep(const optimizer::OptimizerId& id, const engine::StepReport& report) {
  metrics_->OnStep(id, report);
  hub_->OnStep(id, report);
  const uint32_t skips = report.verdict.consecutive_skips;
  const bool power_of_two = (skips & (skips - 1)) == 0;
  if (skips >= 4 && power_of_two) {
    LogWarning(absl::StrFormat("optimizer \"%s\": step %d was skipped, %d in a row; %s", id.name, report.verdict.step,
                               skips, VerdictText(report.verdict.verdict)));
  }
}

void Observers::OnCheckpoint(const optimizer::OptimizerId& id, const optimizer::CheckpointReport& report) {
  metrics_->OnCheckpoint(id, report);
  if (report.status.ok()) {
    LogInfo(absl::StrFormat("optimizer \"%s\": checkpoint of step %d in %s, %.1f MB in %.2f s", id.name,
                            report.committed_steps, report.directory, static_cast<double>(report.bytes) / 1e6,
                            absl::ToDoubleSeconds(report.duration)));
  } else {
    LogWarning(absl::StrCat("optimizer \"", id.name, "\": no checkpoint in ", report.directory, ": ",
                            report.status.message()));
  }
}

void Observers::OnHost(const optimizer::OptimizerId& id, const std::string& unique_id,
                       const engine::RunMember& member) {
  metrics_->OnHost(id, unique_id, member);
}

void Observers::OnDelete(const optimizer::OptimizerId& id) {
  scheduler_->Forget(id);
  metrics_->OnDelete(id);
  stop_checkpoints_->Forget(id);
}

}  // namespace superoffload::host
