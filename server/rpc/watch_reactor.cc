#include "server/rpc/watch_reactor.h"

#include <optional>
#include <utility>

#include "server/rpc/to_proto.h"

namespace superoffload::rpc {

WatchReactor* WatchReactor::Start(optimizer::StepReportHub* hub, std::unique_ptr<BoundedCalls::Place> place,
                                  std::function<bool(const optimizer::OptimizerId&)> filter) {
  std::shared_ptr<WatchReactor> reactor(new WatchReactor());
  reactor->place_ = std::move(place);
  reactor->self_ = reactor;
  reactor->watch_ = hub->Add(std::move(filter), [weak = std::weak_ptr<WatchReactor>(reactor)] {
    if (const std::shared_ptr<WatchReactor> alive = weak.lock()) alive->MaybeWrite();
  });
  reactor->StartSendInitialMetadata();  // the watcher knows from here on that no report is missed
  reactor->MaybeWrite();
  return reactor.get();
}

void WatchReactor::MaybeWrite() {
  absl::MutexLock lock(&mu_);
  if (writing_ || finished_) return;
  std::optional<optimizer::WatchedStep> step = watch_->Next();
  if (!step) return;
  report_ = ToProto(*step);
  writing_ = true;
  StartWrite(&report_);
}

void WatchReactor::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
  }
  if (ok) MaybeWrite();
}

void WatchReactor::OnCancel() {
  absl::MutexLock lock(&mu_);
  if (!std::exchange(finished_, true)) Finish(grpc::Status::CANCELLED);
}

}  // namespace superoffload::rpc
