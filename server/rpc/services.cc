#include "server/rpc/services.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/attach_reactor.h"
#include "server/rpc/durable.h"
#include "server/rpc/from_proto.h"
#include "server/rpc/paged_call.h"
#include "server/rpc/plan_pages.h"
#include "server/rpc/preview.h"
#include "server/rpc/to_proto.h"
#include "server/rpc/watch_reactor.h"

namespace superoffload::rpc {
namespace {

// For a schedule's directory to be claimed; a file system that takes longer is not waited for.
constexpr absl::Duration kClaimPatience = absl::Seconds(5);

// A call that ends before it began.
template <typename Reactor>
class Failed final : public Reactor {
 public:
  explicit Failed(const absl::Status& status) { this->Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

constexpr int kDefaultPageSize = 256;
constexpr uint32_t kMaxPageSize = 1000;
constexpr size_t kPageBytes = 1 << 20;  // a page ends with the entry with which it has so many

// Names the last optimizer of a page.
std::string PageToken(const optimizer::OptimizerId& last) { return absl::StrCat(last.uid, "/", last.name); }

absl::StatusOr<optimizer::OptimizerId> FromPageToken(const std::string& token) {
  const size_t slash = token.find('/');
  optimizer::OptimizerId last;
  if (slash != std::string::npos && absl::SimpleAtoi(token.substr(0, slash), &last.uid)) {
    last.name = token.substr(slash + 1);
    return last;
  }
  return absl::InvalidArgumentError("page_token is not that of a page; leave it out for the first page");
}

// An answer that may be a page. That has its place until it is sent: a trainer that reads slowly has no more of them.
class Answer final : public grpc::ServerUnaryReactor {
 public:
  absl::Status Take(BoundedCalls& calls, uid_t uid) {
    absl::StatusOr<std::unique_ptr<BoundedCalls::Place>> place = calls.Begin(uid);
    if (place.ok()) place_ = *std::move(place);
    return place.status();
  }
  void OnDone() override { delete this; }

 private:
  std::unique_ptr<BoundedCalls::Place> place_;
};

}  // namespace

grpc::ServerReadReactor<v1::CreateOptimizerRequest>* OptimizerServiceImpl::CreateOptimizer(
    grpc::CallbackServerContext* context, v1::Optimizer* response) {
  absl::StatusOr<transport::Peer> peer = callers_.AuthenticateTrainer(*context);
  if (!peer.ok()) return new Failed<grpc::ServerReadReactor<v1::CreateOptimizerRequest>>(peer.status());
  return new PagedCall<v1::CreateOptimizerRequest>(
      table_->budget(), peer->uid, [this, peer = *peer, response](const v1::CreateOptimizerRequest& request) {
        return Create(peer, request, response);
      });
}

absl::Status OptimizerServiceImpl::Create(const transport::Peer& peer, const v1::CreateOptimizerRequest& request,
                                          v1::Optimizer* response) {
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(request);
  if (!spec.ok()) return spec.status();
  absl::StatusOr<Policies> policies = ToPolicies(request.policies());
  if (!policies.ok()) return policies.status();
  if (absl::Status status = scheduler_->CheckDirectory({peer.uid, request.name()}, spec->member, policies->schedule);
      !status.ok()) {
    return status;
  }
  if (request.validate_only()) {
    absl::StatusOr<v1::Optimizer> preview = Preview(*table_, peer, request, *spec);
    if (preview.ok()) *response = *std::move(preview);
    return preview.status();
  }
  const std::string id = optimizer::NewUniqueId();
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Create(
      peer, request.name(), *std::move(spec), policies->speculation, Describe(peer.uid, request, id), id);
  if (!optimizer.ok()) return optimizer.status();
  (*optimizer)->engine().SetLineage(request.lineage());
  if (request.anonymous()) (*optimizer)->SetUnreachable();
  if (absl::Status status = ApplyPolicies(*table_, *scheduler_, *optimizer, *policies, kClaimPatience); !status.ok()) {
    table_->Delete(peer, request.name()).IgnoreError();
    return status;
  }
  *response = Show(**optimizer);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* OptimizerServiceImpl::GetOptimizer(grpc::CallbackServerContext* context,
                                                             const v1::GetOptimizerRequest* request,
                                                             v1::Optimizer* response) {
  auto* const answer = new Answer;
  absl::StatusOr<transport::Peer> peer = callers_.Authenticate(*context);
  absl::StatusOr<optimizer::OptimizerPtr> optimizer =
      peer.ok() ? table_->Get(*peer, request->name()) : absl::StatusOr<optimizer::OptimizerPtr>(peer.status());
  absl::Status status = optimizer.status();
  const bool full = request->view() == v1::OPTIMIZER_VIEW_FULL;
  if (status.ok() && full) status = answer->Take(plan_pages_, peer->uid);
  if (status.ok() && request->page_token().empty()) *response = Show(**optimizer);
  if (status.ok() && full) status = AddPlanPage(**optimizer, request->page_token(), kPageBytes, response);
  answer->Finish(ToGrpc(status));
  return answer;
}

grpc::Status OptimizerServiceImpl::ListOptimizers(grpc::ServerContext* context,
                                                  const v1::ListOptimizersRequest* request,
                                                  v1::ListOptimizersResponse* response) {
  absl::StatusOr<transport::Peer> peer = callers_.Authenticate(*context);
  if (!peer.ok()) return ToGrpc(peer.status());
  std::map<optimizer::OptimizerId, std::function<v1::Optimizer()>> visible;
  for (const optimizer::OptimizerPtr& optimizer : table_->List(*peer)) {
    visible[optimizer->id()] = [this, optimizer] { return Show(*optimizer); };
  }
  for (const optimizer::OptimizerTable::Damaged& damaged : table_->ListDamaged(*peer)) {
    visible[damaged.id] = [damaged] { return ToProto(damaged); };
  }
  auto next = visible.begin();
  if (!request->page_token().empty()) {
    absl::StatusOr<optimizer::OptimizerId> last = FromPageToken(request->page_token());
    if (!last.ok()) return ToGrpc(last.status());
    next = visible.upper_bound(*last);
  }
  const int page_size = request->page_size() == 0
                            ? kDefaultPageSize
                            : static_cast<int>(std::min<uint32_t>(request->page_size(), kMaxPageSize));
  size_t bytes = 0;
  for (; next != visible.end() && response->optimizers_size() < page_size && bytes < kPageBytes; ++next) {
    *response->add_optimizers() = next->second();
    bytes += response->optimizers().rbegin()->ByteSizeLong();
  }
  if (next != visible.end()) response->set_next_page_token(PageToken(std::prev(next)->first));
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::DeleteOptimizer(grpc::ServerContext* context,
                                                   const v1::DeleteOptimizerRequest* request,
                                                   v1::DeleteOptimizerResponse*) {
  absl::StatusOr<transport::Peer> peer = callers_.Authenticate(*context);
  if (!peer.ok()) return ToGrpc(peer.status());
  return ToGrpc(table_->Delete(*peer, request->name()));
}

grpc::Status OptimizerServiceImpl::DetachOptimizer(grpc::ServerContext* context,
                                                   const v1::DetachOptimizerRequest* request,
                                                   v1::DetachOptimizerResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.FindAttached(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  const uint64_t epoch = (*optimizer)->attachment().epoch;
  (*optimizer)->RequestDetach(epoch, absl::CancelledError("the trainer detached"));
  (*optimizer)->WaitDetached(epoch);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::PushParameters(grpc::ServerContext* context,
                                                  const v1::PushParametersRequest* request,
                                                  v1::PushParametersResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.FindAttached(*context, request->name());
  return ToGrpc(optimizer.ok() ? (*optimizer)->engine().WaitPushed() : optimizer.status());
}

grpc::Status OptimizerServiceImpl::PullParameters(grpc::ServerContext* context,
                                                  const v1::PullParametersRequest* request,
                                                  v1::PullParametersResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.FindAttached(*context, request->name());
  return ToGrpc(optimizer.ok() ? (*optimizer)->engine().WaitPulled() : optimizer.status());
}

grpc::Status OptimizerServiceImpl::SettleOptimizer(grpc::ServerContext* context,
                                                   const v1::SettleOptimizerRequest* request, v1::Optimizer* response) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.Find(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  if (absl::Status status = (*optimizer)->engine().WaitSettled(request->first_bucket()); !status.ok()) {
    return ToGrpc(status);
  }
  *response = Show(**optimizer);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::UpdatePolicies(grpc::ServerContext* context,
                                                  const v1::UpdatePoliciesRequest* request, v1::Optimizer* response) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.Find(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  absl::StatusOr<Policies> policies = ToPolicies(request->policies());
  if (!policies.ok()) return ToGrpc(policies.status());
  if (absl::Status status =
          scheduler_->CheckDirectory((*optimizer)->id(), (*optimizer)->spec().member, policies->schedule);
      !status.ok()) {
    return ToGrpc(status);
  }
  const checkpoint::Schedule last = scheduler_->Get((*optimizer)->id());
  if (absl::Status status = scheduler_->Set(*optimizer, policies->schedule, kClaimPatience); !status.ok()) {
    return ToGrpc(status);
  }
  if (absl::Status status = RememberPolicies(**optimizer, request->policies()); !status.ok()) {
    scheduler_->Set(*optimizer, last, absl::ZeroDuration()).IgnoreError();
    return ToGrpc(status);
  }
  (*optimizer)->engine().SetPolicy(policies->speculation);
  ApplyPolicies(*table_, *scheduler_, *optimizer, *policies, absl::ZeroDuration()).IgnoreError();
  *response = Show(**optimizer);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::ReportGpu(grpc::ServerContext* context, const v1::ReportGpuRequest* request,
                                             v1::ReportGpuResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.FindAttached(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  absl::StatusOr<optimizer::GpuUse> use = ToGpuUse(request->use());
  if (!use.ok()) return ToGrpc(use.status());
  (*optimizer)->SetGpuUse(*std::move(use));
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::LendMemory(grpc::ServerContext* context, const v1::LendMemoryRequest* request,
                                              v1::LendMemoryResponse* response) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = callers_.FindAttached(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  absl::StatusOr<uint64_t> number = (*optimizer)->Lend(request->bytes(), request->held(), table_->binding());
  if (!number.ok()) return ToGrpc(number.status());
  response->set_number(*number);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::ReportRun(grpc::ServerContext* context, const v1::ReportRunRequest* request,
                                             v1::RunReport* response) {
  return ToGrpc(callers_.Exclusively(*context, request->name(), [response](auto& optimizer, const auto& info) {
    absl::StatusOr<engine::RunReport> report = optimizer.Report(info);
    if (report.ok()) *response = ToProto(*report);
    return report.status();
  }));
}

grpc::Status OptimizerServiceImpl::ResolveStep(grpc::ServerContext* context, const v1::ResolveStepRequest* request,
                                               v1::Optimizer* response) {
  const auto resolve = [this, request, response](auto& optimizer, const auto& info) {
    const absl::Status status = request->has_commit()
                                    ? optimizer.CommitPrepared(info, request->attempt(), ToTerms(request->commit()))
                                    : optimizer.AbandonPrepared(info, request->attempt());
    if (status.ok()) *response = Show(optimizer);
    return status;
  };
  return ToGrpc(callers_.Exclusively(*context, request->name(), resolve));
}

grpc::Status OptimizerServiceImpl::CheckpointOptimizer(grpc::ServerContext* context,
                                                       const v1::CheckpointOptimizerRequest* request,
                                                       grpc::ServerWriter<v1::CheckpointProgress>* writer) {
  return checkpoints_.Write(context, request, writer);
}

grpc::Status OptimizerServiceImpl::RestoreOptimizer(grpc::ServerContext* context,
                                                    const v1::RestoreOptimizerRequest* request,
                                                    v1::Optimizer* response) {
  absl::StatusOr<CheckpointCalls::Restored> restored = checkpoints_.Restore(*context, *request);
  if (!restored.ok()) return ToGrpc(restored.status());
  *response = Show(*restored->optimizer);
  response->set_blocks_rounded(restored->answer.blocks_rounded);
  response->set_tensors_converted(restored->answer.tensors_converted);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::ExportOptimizer(grpc::ServerContext* context,
                                                   const v1::ExportOptimizerRequest* request,
                                                   v1::ExportOptimizerResponse* response) {
  return checkpoints_.Export(*context, *request, response);
}

grpc::ServerBidiReactor<v1::AttachOptimizerRequest, v1::AttachOptimizerResponse>* OptimizerServiceImpl::AttachOptimizer(
    grpc::CallbackServerContext* context) {
  using Reactor = grpc::ServerBidiReactor<v1::AttachOptimizerRequest, v1::AttachOptimizerResponse>;
  absl::StatusOr<transport::Peer> peer = callers_.AuthenticateTrainer(*context);
  if (!peer.ok()) return new Failed<Reactor>(peer.status());
  return new AttachReactor(table_, scheduler_, *peer);
}

grpc::ServerWriteReactor<v1::StepReport>* OptimizerServiceImpl::WatchSteps(grpc::CallbackServerContext* context,
                                                                           const v1::WatchStepsRequest* request) {
  absl::StatusOr<transport::Peer> peer = callers_.Authenticate(*context);
  if (!peer.ok()) return new Failed<grpc::ServerWriteReactor<v1::StepReport>>(peer.status());
  std::optional<optimizer::OptimizerId> only;
  if (!request->name().empty()) {
    absl::StatusOr<optimizer::OptimizerPtr> found = table_->Get(*peer, request->name());
    if (!found.ok()) return new Failed<grpc::ServerWriteReactor<v1::StepReport>>(found.status());
    only = (*found)->id();
  }
  auto place = watches_.Begin(peer->uid);
  if (!place.ok()) return new Failed<grpc::ServerWriteReactor<v1::StepReport>>(place.status());
  return WatchReactor::Start(hub_, *std::move(place), [peer = *peer, only](const optimizer::OptimizerId& id) {
    return optimizer::OptimizerTable::MaySee(peer, id) && (!only || *only == id);
  });
}

}  // namespace superoffload::rpc
