// Between the messages of optimizer.proto and the types of the daemon.
#ifndef SUPEROFFLOAD_SERVER_RPC_CONVERT_H_
#define SUPEROFFLOAD_SERVER_RPC_CONVERT_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/checkpoint/scheduler.h"
#include "server/engine/spec.h"
#include "server/engine/speculation.h"
#include "server/optimizer/hosted_optimizer.h"
#include "server/optimizer/optimizer_table.h"
#include "server/optimizer/step_report_hub.h"
#include "server/topology/topology.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

grpc::Status ToGrpc(const absl::Status& status);

// INVALID_ARGUMENT naming the field that holds an unknown enumerator. Ranges are checked by the engine.
absl::StatusOr<engine::OptimizerSpec> ToSpec(const v1::CreateOptimizerRequest& request);
absl::StatusOr<engine::SpeculationPolicy> ToSpeculation(const v1::Policies& policies);
absl::StatusOr<checkpoint::Schedule> ToSchedule(const v1::Policies& policies);
absl::StatusOr<absl::Duration> ToLease(const v1::Policies& policies);  // infinite when it is not set
absl::StatusOr<optimizer::Sync> ToSync(v1::Sync sync);
absl::StatusOr<optimizer::GpuUse> ToGpuUse(const v1::GpuUse& use);  // INVALID_ARGUMENT: too long

enum class Details {
  kListed,  // without groups
  kBasic,
  kFull,  // with parameters and layout
};

v1::Optimizer ToProto(const optimizer::HostedOptimizer& optimizer, const checkpoint::Schedule& schedule,
                      Details details);
v1::Optimizer ToProto(const optimizer::OptimizerTable::Damaged& damaged);
v1::StepReport ToProto(const optimizer::WatchedStep& step);
v1::Topology ToProto(const topology::Topology& topology);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_CONVERT_H_
