// The gRPC services: translate messages into calls of the optimizer table, nothing else.
#ifndef SUPEROFFLOAD_SERVER_RPC_SERVICES_H_
#define SUPEROFFLOAD_SERVER_RPC_SERVICES_H_

#include <functional>

#include "server/checkpoint/scheduler.h"
#include "server/optimizer/optimizer_table.h"
#include "server/optimizer/step_report_hub.h"
#include "server/rpc/bounded_calls.h"
#include "server/rpc/callers.h"
#include "server/rpc/checkpoint_calls.h"
#include "server/rpc/to_proto.h"
#include "superoffload/v1/optimizer.grpc.pb.h"

namespace superoffload::rpc {

class ServerServiceImpl final : public v1::ServerService::Service {
 public:
  // `info` is called for every request.
  ServerServiceImpl(std::function<v1::ServerInfo()> info, absl::StatusOr<v1::Topology> topology)
      : info_(std::move(info)), topology_(std::move(topology)) {}

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*, v1::ServerInfo* response) override {
    *response = info_();
    return grpc::Status::OK;
  }

  grpc::Status GetTopology(grpc::ServerContext*, const v1::GetTopologyRequest*, v1::Topology* response) override {
    if (!topology_.ok()) return ToGrpc(topology_.status());
    *response = *topology_;
    return grpc::Status::OK;
  }

 private:
  const std::function<v1::ServerInfo()> info_;
  const absl::StatusOr<v1::Topology> topology_;
};

// Unary calls are synchronous, since some wait for the kernels. Others are reactors, which hold no thread while they
// wait for their client: streams, requests that come in pages, and GetOptimizer, which learns that way when a page is
// sent.
using OptimizerServiceBase = v1::OptimizerService::WithCallbackMethod_AttachOptimizer<
    v1::OptimizerService::WithCallbackMethod_CreateOptimizer<v1::OptimizerService::WithCallbackMethod_GetOptimizer<
        v1::OptimizerService::WithCallbackMethod_WatchSteps<v1::OptimizerService::Service>>>>;

class OptimizerServiceImpl final : public OptimizerServiceBase {
 public:
  // All must outlive the service.
  OptimizerServiceImpl(optimizer::OptimizerTable* table, checkpoint::Scheduler* scheduler,
                       optimizer::StepReportHub* hub, optimizer::OptimizerObserver* observer,
                       const transport::DescriptorServer* descriptors, uint32_t calls_per_second)
      : table_(table),
        scheduler_(scheduler),
        hub_(hub),
        callers_(table, descriptors, calls_per_second),
        checkpoints_(&callers_, table, observer) {}

  void SetCallsPerSecond(uint32_t calls_per_second) { callers_.SetCallsPerSecond(calls_per_second); }

  // Cancels the checkpoints that calls wait for.
  void CancelCheckpoints() { checkpoints_.Cancel(); }

  grpc::ServerReadReactor<v1::CreateOptimizerRequest>* CreateOptimizer(grpc::CallbackServerContext*,
                                                                       v1::Optimizer*) override;
  grpc::ServerUnaryReactor* GetOptimizer(grpc::CallbackServerContext*, const v1::GetOptimizerRequest*,
                                         v1::Optimizer*) override;
  grpc::Status ListOptimizers(grpc::ServerContext*, const v1::ListOptimizersRequest*,
                              v1::ListOptimizersResponse*) override;
  grpc::Status DeleteOptimizer(grpc::ServerContext*, const v1::DeleteOptimizerRequest*,
                               v1::DeleteOptimizerResponse*) override;
  grpc::Status DetachOptimizer(grpc::ServerContext*, const v1::DetachOptimizerRequest*,
                               v1::DetachOptimizerResponse*) override;
  grpc::Status PushParameters(grpc::ServerContext*, const v1::PushParametersRequest*,
                              v1::PushParametersResponse*) override;
  grpc::Status PullParameters(grpc::ServerContext*, const v1::PullParametersRequest*,
                              v1::PullParametersResponse*) override;
  grpc::Status SettleOptimizer(grpc::ServerContext*, const v1::SettleOptimizerRequest*, v1::Optimizer*) override;
  grpc::Status UpdatePolicies(grpc::ServerContext*, const v1::UpdatePoliciesRequest*, v1::Optimizer*) override;
  grpc::Status ReportGpu(grpc::ServerContext*, const v1::ReportGpuRequest*, v1::ReportGpuResponse*) override;
  grpc::Status LendMemory(grpc::ServerContext*, const v1::LendMemoryRequest*, v1::LendMemoryResponse*) override;
  grpc::Status ReportRun(grpc::ServerContext*, const v1::ReportRunRequest*, v1::RunReport*) override;
  grpc::Status ResolveStep(grpc::ServerContext*, const v1::ResolveStepRequest*, v1::Optimizer*) override;
  grpc::Status CheckpointOptimizer(grpc::ServerContext*, const v1::CheckpointOptimizerRequest*,
                                   grpc::ServerWriter<v1::CheckpointProgress>*) override;
  grpc::Status RestoreOptimizer(grpc::ServerContext*, const v1::RestoreOptimizerRequest*, v1::Optimizer*) override;
  grpc::Status ExportOptimizer(grpc::ServerContext*, const v1::ExportOptimizerRequest*,
                               v1::ExportOptimizerResponse*) override;
  grpc::ServerBidiReactor<v1::AttachOptimizerRequest, v1::AttachOptimizerResponse>* AttachOptimizer(
      grpc::CallbackServerContext*) override;
  grpc::ServerWriteReactor<v1::StepReport>* WatchSteps(grpc::CallbackServerContext*,
                                                       const v1::WatchStepsRequest*) override;

 private:
  absl::Status Create(const transport::Peer& peer, const v1::CreateOptimizerRequest& request, v1::Optimizer* response);

  v1::Optimizer Show(const optimizer::HostedOptimizer& optimizer) const {
    return ToProto(optimizer, scheduler_->Get(optimizer.id()));
  }

  optimizer::OptimizerTable* const table_;
  checkpoint::Scheduler* const scheduler_;
  optimizer::StepReportHub* const hub_;
  Callers callers_;
  CheckpointCalls checkpoints_;
  BoundedCalls plan_pages_{8, 64, "pages of the parameters of optimizers"};
  BoundedCalls watches_{64, 512, "streams of step reports"};
};

}  // namespace superoffload::rpc

#endif  // SUPEROFFLOAD_SERVER_RPC_SERVICES_H_
