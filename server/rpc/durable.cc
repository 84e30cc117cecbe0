#include "server/rpc/durable.h"

#include <algorithm>
#include <utility>

#include "absl/base/const_init.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/record.h"
#include "server/rpc/from_proto.h"
#include "superoffload/v1/durable.pb.h"

namespace superoffload::rpc {

absl::StatusOr<v1::DurableOptimizer> ReadDurable(const optimizer::HostedMemory& memory) {
  absl::StatusOr<std::string> description = memory.Description();
  if (!description.ok()) return description.status();
  v1::DurableOptimizer durable;
  if (durable.ParseFromString(*description)) return durable;
  return absl::DataLossError("the description of the optimizer is damaged");
}

std::string Describe(uid_t uid, const v1::CreateOptimizerRequest& request, const std::string& id) {
  v1::DurableOptimizer durable;
  durable.set_uid(uid);
  durable.set_id(id);
  durable.set_record_version(engine::Record::kVersion);
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

absl::Status ApplyPolicies(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler,
                           const optimizer::OptimizerPtr& optimizer, const Policies& policies,
                           absl::Duration patience) {
  if (absl::Status status = scheduler.Set(optimizer, policies.schedule, patience); !status.ok()) return status;
  if (!table.Hosts(*optimizer)) scheduler.Forget(optimizer->id());  // deleted meanwhile: let its memory go
  table.SetLease(optimizer, policies.lease);
  return absl::OkStatus();
}

absl::Status RememberPolicies(const optimizer::HostedOptimizer& optimizer, const v1::Policies& policies) {
  // A description has one writer at a time. One lock for all optimizers: it is held for microseconds.
  static absl::Mutex mu(absl::kConstInit);
  absl::MutexLock lock(&mu);
  absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(optimizer.memory());
  if (!durable.ok()) return durable.status();
  *durable->mutable_request()->mutable_policies() = policies;
  durable->DiscardUnknownFields();
  return optimizer.memory().Describe(durable->SerializeAsString());
}

namespace {

// Laid out as the record beside it. FAILED_PRECONDITION: that is of a version which this daemon does not read.
absl::StatusOr<engine::OptimizerSpec> SpecOf(const v1::DurableOptimizer& durable) {
  const uint32_t version = std::max(durable.record_version(), 2u);
  if (version < engine::Record::kOldestVersion || version > engine::Record::kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("a daemon of record version ", version, " left the optimizer, this one reads versions ",
                     engine::Record::kOldestVersion, " to ", engine::Record::kVersion,
                     "; go back to that release, take a checkpoint, and restore it with this one"));
  }
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(durable.request());
  if (spec.ok()) spec->layout_version = version;
  return spec;
}

// After an error the memory is still the caller's.
absl::Status Host(optimizer::OptimizerTable& table, checkpoint::Scheduler& scheduler, const optimizer::OptimizerId& id,
                  optimizer::HostedMemory& memory) {
  absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(memory);
  if (!durable.ok()) return durable.status();
  absl::StatusOr<engine::OptimizerSpec> spec = SpecOf(*durable);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<Policies> policies = ToPolicies(durable->request().policies());
  if (!policies.ok()) return policies.status();
  if (id != optimizer::OptimizerId{durable->uid(), durable->request().name()}) {
    return absl::DataLossError("the description is that of another optimizer");
  }
  const bool known = !durable->id().empty();
  if (!known) durable->set_id(optimizer::NewUniqueId());
  absl::StatusOr<optimizer::OptimizerPtr> adopted =
      table.Adopt(id, durable->id(), *std::move(spec), policies->speculation, memory);
  if (!adopted.ok()) return adopted.status();
  if (!known) (*adopted)->memory().Describe(durable->SerializeAsString()).IgnoreError();  // a successor draws another
  if (durable->request().anonymous()) (*adopted)->SetUnreachable();
  return ApplyPolicies(table, scheduler, *adopted, *policies, /*patience=*/absl::ZeroDuration());
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

absl::StatusOr<optimizer::Salvaged> Salvage(const optimizer::OptimizerId& id, std::vector<memory::FileDescriptor> fds,
                                            engine::WorkerPool* pool) {
  absl::StatusOr<optimizer::HostedMemory> memory = optimizer::HostedMemory::Open(fds);
  if (!memory.ok()) return memory.status();
  const absl::StatusOr<v1::DurableOptimizer> durable = ReadDurable(*memory);
  if (!durable.ok()) return durable.status();
  absl::StatusOr<engine::OptimizerSpec> spec = SpecOf(*durable);
  if (!spec.ok()) return spec.status();
  return optimizer::Salvage(id, *std::move(spec), *std::move(memory), pool);
}

}  // namespace superoffload::rpc
