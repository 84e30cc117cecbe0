// Optimizers that outlive the daemon: their description, and how a successor hosts them.
#ifndef SUPEROFFLOAD_SERVER_RPC_DURABLE_H_
#define SUPEROFFLOAD_SERVER_RPC_DURABLE_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/checkpoint/scheduler.h"
#include "server/optimizer/optimizer_table.h"
#include "server/optimizer/salvage.h"
#include "superoffload/v1/durable.pb.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// A serialized DurableOptimizer.
std::string Describe(uid_t uid, const v1::CreateOptimizerRequest& request, const std::string& id = "");

// What a description holds. DATA_LOSS: it is damaged.
absl::StatusOr<v1::DurableOptimizer> ReadDurable(const optimizer::HostedMemory& memory);

// Policies as they are applied to an optimizer.
struct Policies {
  engine::SpeculationPolicy speculation;
  checkpoint::Schedule schedule;
  absl::Duration lease;
};

// INVALID_ARGUMENT names the field.
absl::StatusOr<Policies> ToPolicies(const v1::Policies& policies);

// What of them concerns others than the engine. Errors: see Scheduler::Set; nothing has changed then.
absl::Status ApplyPolicies(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler,
                           const optimizer::OptimizerPtr& optimizer, const Policies& policies, absl::Duration patience);

// Has a successor know the optimizer with these policies. Thread-safe. RESOURCE_EXHAUSTED: they are too long.
absl::Status RememberPolicies(const optimizer::HostedOptimizer& optimizer, const v1::Policies& policies);

// Hosts the optimizer `id` whose memory `fds` are. After an error, as of memory that is damaged or of another version,
// it stays as it is, and the table holds it as damaged.
absl::Status Adopt(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler, const optimizer::OptimizerId& id,
                   std::vector<memory::FileDescriptor> fds);

// What can be had of a damaged optimizer whose memory `fds` are; see optimizer::Salvage. DATA_LOSS: without its
// description nothing tells what the memory holds.
absl::StatusOr<optimizer::Salvaged> Salvage(const optimizer::OptimizerId& id, std::vector<memory::FileDescriptor> fds,
                                            engine::WorkerPool* pool);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_DURABLE_H_
