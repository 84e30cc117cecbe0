// Calls that read and write files: checkpoints, restoring, exports of damaged optimizers.
#ifndef SUPEROFFLOAD_SERVER_RPC_CHECKPOINT_CALLS_H_
#define SUPEROFFLOAD_SERVER_RPC_CHECKPOINT_CALLS_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "server/checkpoint/reader.h"
#include "server/optimizer/optimizer_table.h"
#include "server/rpc/bounded_calls.h"
#include "server/rpc/callers.h"
#include "superoffload/v1/optimizer.grpc.pb.h"

namespace superoffload::rpc {

class CheckpointCalls {
 public:
  // All must outlive it.
  CheckpointCalls(const Callers* callers, optimizer::OptimizerTable* table, optimizer::OptimizerObserver* observer)
      : callers_(callers), table_(table), observer_(observer) {}

  // Cancels what calls wait for.
  void Cancel() { stopping_ = true; }

  grpc::Status Write(grpc::ServerContext* context, const v1::CheckpointOptimizerRequest* request,
                     grpc::ServerWriter<v1::CheckpointProgress>* writer);
  struct Restored {
    optimizer::OptimizerPtr optimizer;
    checkpoint::Restored answer;
  };
  absl::StatusOr<Restored> Restore(const grpc::ServerContextBase& context, const v1::RestoreOptimizerRequest& request);
  grpc::Status Export(const grpc::ServerContextBase& context, const v1::ExportOptimizerRequest& request,
                      v1::ExportOptimizerResponse* response);

 private:
  const Callers* const callers_;
  optimizer::OptimizerTable* const table_;
  optimizer::OptimizerObserver* const observer_;
  BoundedCalls file_operations_{8, 32, "calls that read or write files"};
  BoundedCalls exports_{1, 1, "exports of damaged optimizers"};
  std::atomic<bool> stopping_{false};
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_CHECKPOINT_CALLS_H_
