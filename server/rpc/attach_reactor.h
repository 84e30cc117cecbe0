// The AttachOptimizer stream: one message, then silence until either side ends the attachment.
#ifndef SUPEROFFLOAD_SERVER_RPC_ATTACH_REACTOR_H_
#define SUPEROFFLOAD_SERVER_RPC_ATTACH_REACTOR_H_

#include <grpcpp/support/server_callback.h>

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/checkpoint/scheduler.h"
#include "server/optimizer/optimizer_table.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// Deletes itself once gRPC is done with it.
class AttachReactor final : public grpc::ServerWriteReactor<v1::AttachOptimizerResponse> {
 public:
  // Attaches and writes the message, or finishes with the error.
  AttachReactor(optimizer::OptimizerTable* table, const checkpoint::Scheduler* scheduler, const transport::Peer& peer,
                const v1::AttachOptimizerRequest& request);

 private:
  absl::Status Attach(const transport::Peer& peer, const v1::AttachOptimizerRequest& request);
  void OnEnd(const absl::Status& reason);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { delete this; }

  optimizer::OptimizerTable* const table_;
  // Keeps the optimizer until gRPC is done, so that the attachment's own thread never destroys it.
  optimizer::OptimizerPtr optimizer_;
  uint64_t epoch_ = 0;
  v1::AttachOptimizerResponse response_;
  absl::Mutex mu_;
  bool writing_ ABSL_GUARDED_BY(mu_) = true;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_ATTACH_REACTOR_H_
