// Who calls, and what they may use.
#ifndef SUPEROFFLOAD_SERVER_RPC_CALLERS_H_
#define SUPEROFFLOAD_SERVER_RPC_CALLERS_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/optimizer/optimizer_table.h"
#include "server/rpc/call_quota.h"

namespace superoffload::rpc {

class Callers {
 public:
  // Both must outlive it.
  Callers(optimizer::OptimizerTable* table, const transport::DescriptorServer* descriptors, uint32_t calls_per_second)
      : table_(table), descriptors_(descriptors), quota_(calls_per_second) {}

  void SetCallsPerSecond(uint32_t calls_per_second) { quota_.SetCallsPerSecond(calls_per_second); }

  absl::StatusOr<transport::Peer> Authenticate(const grpc::ServerContextBase& context) const;

  // The same for what only a process of this machine can do: FAILED_PRECONDITION for remote operators.
  absl::StatusOr<transport::Peer> AuthenticateTrainer(const grpc::ServerContextBase& context) const;

  absl::StatusOr<optimizer::OptimizerPtr> Find(const grpc::ServerContextBase& context, const std::string& name) const;

  // The optimizer, if the caller is the one attached to it.
  absl::StatusOr<optimizer::OptimizerPtr> FindAttached(const grpc::ServerContextBase& context,
                                                       const std::string& name) const;

  // Has `body` act as the optimizer's only user.
  absl::Status Exclusively(
      const grpc::ServerContextBase& context, const std::string& name,
      const std::function<absl::Status(optimizer::HostedOptimizer&, const optimizer::AttachedTrainer&)>& body) const;

 private:
  optimizer::OptimizerTable* const table_;
  const transport::DescriptorServer* const descriptors_;
  mutable CallQuota quota_;
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_CALLERS_H_
