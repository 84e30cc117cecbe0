// From the types of the daemon to the messages of optimizer.proto, and to the statuses of gRPC.
#ifndef SUPEROFFLOAD_SERVER_RPC_TO_PROTO_H_
#define SUPEROFFLOAD_SERVER_RPC_TO_PROTO_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "server/checkpoint/scheduler.h"
#include "server/optimizer/hosted_optimizer.h"
#include "server/optimizer/optimizer_table.h"
#include "server/optimizer/step_report_hub.h"
#include "server/topology/topology.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::rpc {

grpc::Status ToGrpc(const absl::Status& status);

// Of a call whose client has gone, or closed its side, before the last page of the request.
inline grpc::Status EndedEarly() { return {grpc::StatusCode::CANCELLED, "the request ended before its last page"}; }

v1::RunTerms ToProto(const engine::Record::RunTerms& terms);
v1::PreparedStep ToProto(const engine::Record::Prepared& prepared);
v1::RunReport ToProto(const engine::RunReport& report);
v1::DataType ToProto(kernels::DType type);
// Of OPTIMIZER_VIEW_BASIC; plan_pages.h has the rest.
v1::Optimizer ToProto(const optimizer::HostedOptimizer& optimizer, const checkpoint::Schedule& schedule);
v1::Optimizer ToProto(const optimizer::OptimizerTable::Damaged& damaged);
v1::StepReport ToProto(const optimizer::WatchedStep& step);
v1::Topology ToProto(const topology::Topology& topology);
v1::Algorithm ToProto(const kernels::Algorithm& algorithm);

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_TO_PROTO_H_
