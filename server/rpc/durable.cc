#include "server/rpc/durable.h"

#include <utility>

#include "server/rpc/convert.h"
#include "superoffload/v1/durable.pb.h"

namespace superoffload::rpc {
absl::StatusOr<v1::DurableOptimizer> ReadDurable(const optimizer::HostedMemory& memory) {
  absl::StatusOr<std::string> description = memory.Description();
  if (!description.ok()) return description.status();
  v1::DurableOptimizer durable;
  if (durable.ParseFromString(*description)) return durable;
  return absl::DataLossError("the description of the optimizer is damaged");
}

std::string Describe(uid_t uid, const v1::CreateOptimizerRequest& request) {
  v1::DurableOptimizer durable;
  durable.set_uid(uid);
  *durable.mutable_request() = request;
  durable.DiscardUnknownFields();  // nobody reads them, and nobody is charged for them
  return durable.SerializeAsString();
}

absl::StatusOr<Policies> ToPolicies(const v1::Policies& policies) {
  absl::StatusOr<engine::SpeculationPolicy> speculation = ToSpeculation(policies);
  if (!speculation.ok()) return speculation.status();
  absl::StatusOr<checkpoint::Schedule> schedule = ToSchedule(policies);
  if (!schedule.ok()) return schedule.status();
  absl::StatusOr<absl::Duration> lease = ToLease(policies);
  if (!lease.ok()) return lease.status();
  return Policies{*speculation, *std::move(schedule), *lease};
}

void ApplyPolicies(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler,
                   const optimizer::OptimizerPtr& optimizer, const Policies& policies) {
  scheduler.Set(optimizer, policies.schedule);
  table.SetLease(optimizer, policies.lease);
}

absl::Status RememberPolicies(const optimizer::HostedOptimizer& optimizer, const v1::Policies& policies) {
  absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(optimizer.memory());
  if (!durable.ok()) return durable.status();
  *durable->mutable_request()->mutable_policies() = policies;
  durable->DiscardUnknownFields();
  return optimizer.memory().Describe(durable->SerializeAsString());
}

absl::StatusOr<std::string> Adopt(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler,
                                  std::vector<memory::FileDescriptor> fds) {
  absl::StatusOr<optimizer::HostedMemory> memory = optimizer::HostedMemory::Open(std::move(fds));
  if (!memory.ok()) return memory.status();
  absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(*memory);
  if (!durable.ok()) return durable.status();
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(durable->request());
  if (!spec.ok()) return spec.status();
  absl::StatusOr<Policies> policies = ToPolicies(durable->request().policies());
  if (!policies.ok()) return policies.status();
  const optimizer::OptimizerId id{durable->uid(), durable->request().name()};
  absl::StatusOr<optimizer::OptimizerPtr> adopted =
      table.Adopt(id, *std::move(spec), policies->speculation, *std::move(memory));
  if (!adopted.ok()) return adopted.status();
  ApplyPolicies(table, scheduler, *adopted, *policies);
  return id.name;
}

}  // namespace superoffload::rpc
