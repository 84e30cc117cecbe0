// The WatchSteps stream.
#ifndef SUPEROFFLOAD_SERVER_RPC_WATCH_REACTOR_H_
#define SUPEROFFLOAD_SERVER_RPC_WATCH_REACTOR_H_

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/optimizer/step_report_hub.h"
#include "server/rpc/bounded_calls.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// Owned by itself until gRPC is done with it, and shared with a report that is being delivered.
class WatchReactor final : public grpc::ServerWriteReactor<v1::StepReport>,
                           public std::enable_shared_from_this<WatchReactor> {
 public:
  // Streams the reports that pass `filter`. Has its place among the streams until it ends.
  static WatchReactor* Start(optimizer::StepReportHub* hub, std::unique_ptr<BoundedCalls::Place> place,
                             std::function<bool(const optimizer::OptimizerId&)> filter);

 private:
  WatchReactor() = default;
  void MaybeWrite() ABSL_LOCKS_EXCLUDED(mu_);

  void OnWriteDone(bool ok) override;
  // The watcher has gone, or the server is shutting down.
  void OnCancel() override;
  void OnDone() override {
    place_.reset();
    self_.reset();
  }

  std::unique_ptr<BoundedCalls::Place> place_;
  std::shared_ptr<WatchReactor> self_;
  std::shared_ptr<optimizer::StepReportHub::Watch> watch_;
  absl::Mutex mu_;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  v1::StepReport report_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_WATCH_REACTOR_H_
