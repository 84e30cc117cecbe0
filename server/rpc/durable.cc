#include "server/rpc/durable.h"

#include <utility>

#include "server/rpc/convert.h"
#include "superoffload/v1/durable.pb.h"

namespace superoffload::rpc {

std::string Describe(uid_t uid, const v1::CreateOptimizerRequest& request) {
  v1::DurableOptimizer durable;
  durable.set_uid(uid);
  *durable.mutable_request() = request;
  return durable.SerializeAsString();
}

absl::StatusOr<std::string> Adopt(optimizer::OptimizerTable& table, std::vector<memory::FileDescriptor> fds) {
  absl::StatusOr<optimizer::HostedMemory> memory = optimizer::HostedMemory::Open(std::move(fds));
  if (!memory.ok()) return memory.status();
  absl::StatusOr<std::string> description = memory->Description();
  if (!description.ok()) return description.status();
  v1::DurableOptimizer durable;
  if (!durable.ParseFromString(*description)) return absl::DataLossError("the description of the optimizer is damaged");
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(durable.request());
  if (!spec.ok()) return spec.status();
  absl::StatusOr<engine::SpeculationPolicy> policy = ToPolicy(durable.request().policies());
  if (!policy.ok()) return policy.status();
  const optimizer::OptimizerId id{durable.uid(), durable.request().name()};
  if (absl::Status status = table.Adopt(id, *std::move(spec), *policy, *std::move(memory)); !status.ok()) return status;
  return id.name;
}

}  // namespace superoffload::rpc
