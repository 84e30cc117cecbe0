// From the messages of optimizer.proto to the types of the daemon.
#ifndef SUPEROFFLOAD_SERVER_RPC_FROM_PROTO_H_
#define SUPEROFFLOAD_SERVER_RPC_FROM_PROTO_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/scheduler.h"
#include "server/engine/record.h"
#include "server/engine/spec.h"
#include "server/engine/speculation.h"
#include "server/optimizer/hosted_optimizer.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

// INVALID_ARGUMENT naming the field that holds an unknown enumerator. Ranges are checked by the engine.
absl::StatusOr<engine::OptimizerSpec> ToSpec(const v1::CreateOptimizerRequest& request);
absl::StatusOr<engine::SpeculationPolicy> ToSpeculation(const v1::Policies& policies);
absl::StatusOr<checkpoint::Schedule> ToSchedule(const v1::Policies& policies);
absl::StatusOr<absl::Duration> ToLease(const v1::Policies& policies);  // infinite when it is not set
checkpoint::RestoreSource ToRestoreSource(const v1::RestoreOptimizerRequest& request);
absl::StatusOr<optimizer::Sync> ToSync(v1::Sync sync);
absl::StatusOr<optimizer::GpuUse> ToGpuUse(const v1::GpuUse& use);  // INVALID_ARGUMENT: too long
engine::Record::RunTerms ToTerms(const v1::RunTerms& terms);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_FROM_PROTO_H_
