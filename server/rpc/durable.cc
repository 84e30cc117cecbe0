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

namespace {

// After an error the memory is still the caller's.
absl::Status Host(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler, const optimizer::OptimizerId& id,
                  optimizer::HostedMemory& memory) {
  absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(memory);
  if (!durable.ok()) return durable.status();
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(durable->request());
  if (!spec.ok()) return spec.status();
  absl::StatusOr<Policies> policies = ToPolicies(durable->request().policies());
  if (!policies.ok()) return policies.status();
  if (id != optimizer::OptimizerId{durable->uid(), durable->request().name()}) {
    return absl::DataLossError("the description is that of another optimizer");
  }
  absl::StatusOr<optimizer::OptimizerPtr> adopted =
      table.Adopt(id, *std::move(spec), policies->speculation, memory);
  if (!adopted.ok()) return adopted.status();
  ApplyPolicies(table, scheduler, *adopted, *policies);
  return absl::OkStatus();
}

}  // namespace

absl::Status Adopt(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler, const optimizer::OptimizerId& id,
                   std::vector<memory::FileDescriptor> fds) {
  absl::StatusOr<optimizer::HostedMemory> memory = optimizer::HostedMemory::Open(fds);
  absl::Status status = memory.status();
  if (memory.ok()) status = Host(table, scheduler, id, *memory);
  if (status.ok()) return status;
  table.HoldDamaged(id, status, memory.ok() ? memory->Release() : std::move(fds));
  return status;
}

}  // namespace superoffload::rpc
