// The AttachOptimizer stream: pages of a request, one message in answer, then silence until either side ends the
// attachment.
#ifndef SUPEROFFLOAD_SERVER_RPC_ATTACH_REACTOR_H_
#define SUPEROFFLOAD_SERVER_RPC_ATTACH_REACTOR_H_

#include <grpcpp/support/server_callback.h>

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/checkpoint/scheduler.h"
#include "server/optimizer/optimizer_table.h"
#include "server/rpc/paged_request.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// Deletes itself once gRPC is done with it.
class AttachReactor final : public grpc::ServerBidiReactor<v1::AttachOptimizerRequest, v1::AttachOptimizerResponse> {
 public:
  // Attaches when the request is there and writes the message, or finishes with the error. Attaching waits for the end
  // of a push or of a snapshot, so it has a thread of its own: those of gRPC are few, and all users'.
  AttachReactor(optimizer::OptimizerTable* table, const checkpoint::Scheduler* scheduler, const transport::Peer& peer);

 private:
  void Answer();
  // Returns whether the call was cancelled meanwhile.
  absl::StatusOr<bool> Attach(const v1::AttachOptimizerRequest& request);
  void OnEnd(const absl::Status& reason);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { delete this; }

  optimizer::OptimizerTable* const table_;
  const checkpoint::Scheduler* const scheduler_;
  const transport::Peer peer_;
  v1::AttachOptimizerRequest page_;
  // Until the attachment is made.
  std::optional<PagedRequest<v1::AttachOptimizerRequest>> request_;
  v1::AttachOptimizerResponse response_;
  absl::Mutex mu_;
  // Keeps the optimizer until gRPC is done, so that the attachment's own thread never destroys it.
  optimizer::OptimizerPtr optimizer_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = true;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_ATTACH_REACTOR_H_
