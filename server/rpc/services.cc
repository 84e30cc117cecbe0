#include "server/rpc/services.h"

#include <grpc/grpc_security_constants.h>

#include <optional>
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/checkpoint/act_as.h"
#include "server/checkpoint/reader.h"
#include "server/checkpoint/writer.h"
#include "server/memory/thread.h"
#include "server/rpc/attach_reactor.h"
#include "server/rpc/durable.h"
#include "server/rpc/watch_reactor.h"

namespace superoffload::rpc {
namespace {

constexpr absl::Duration kProgressInterval = absl::Milliseconds(200);

// Has no session: those are numbered from 1.
constexpr transport::Peer kRemoteOperator{.session = 0, .uid = 0, .pid = 0, .is_operator = true};

// The listener for TCP demands a certificate of the operators' authority (daemon.cc).
bool IsRemoteOperator(const grpc::ServerContextBase& context) {
  const std::vector<grpc::string_ref> type =
      context.auth_context()->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  return type.size() == 1 && type.front() == GRPC_SSL_TRANSPORT_SECURITY_TYPE &&
         context.auth_context()->IsPeerAuthenticated();
}

// A stream that ends before it began.
template <typename Response>
class FailedStream final : public grpc::ServerWriteReactor<Response> {
 public:
  explicit FailedStream(const absl::Status& status) { this->Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

constexpr int kDefaultPageSize = 256;
constexpr uint32_t kMaxPageSize = 1000;

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

// An answer that may be large. It has its place until it is sent: a trainer that reads slowly has no more of them.
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

absl::StatusOr<transport::Peer> OptimizerServiceImpl::Authenticate(const grpc::ServerContextBase& context) const {
  if (IsRemoteOperator(context)) return kRemoteOperator;
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find(SUPEROFFLOAD_TOKEN_METADATA_KEY);
  absl::StatusOr<transport::Peer> peer =
      descriptors_->Authenticate(it == metadata.end() ? "" : std::string(it->second.data(), it->second.size()));
  if (!peer.ok()) return peer;
  if (absl::Status status = quota_.Take(peer->uid, absl::Now()); !status.ok()) return status;
  return peer;
}

absl::StatusOr<transport::Peer> OptimizerServiceImpl::AuthenticateTrainer(
    const grpc::ServerContextBase& context) const {
  absl::StatusOr<transport::Peer> peer = Authenticate(context);
  if (!peer.ok() || peer->session != kRemoteOperator.session) return peer;
  return absl::FailedPreconditionError(
      "optimizers are created and attached by processes on the daemon's machine, over its unix socket");
}

absl::StatusOr<optimizer::OptimizerPtr> OptimizerServiceImpl::Find(const grpc::ServerContextBase& context,
                                                                   const std::string& name) const {
  absl::StatusOr<transport::Peer> peer = Authenticate(context);
  if (!peer.ok()) return peer.status();
  return table_->Get(*peer, name);
}

absl::StatusOr<optimizer::OptimizerPtr> OptimizerServiceImpl::FindAttached(const grpc::ServerContextBase& context,
                                                                           const std::string& name) const {
  absl::StatusOr<transport::Peer> peer = Authenticate(context);
  if (!peer.ok()) return peer.status();
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Get(*peer, name);
  if (!optimizer.ok()) return optimizer.status();
  if ((*optimizer)->attachment().epoch == 0 || (*optimizer)->attachment().peer.session != peer->session) {
    return absl::FailedPreconditionError(
        absl::StrCat("optimizer \"", name, "\" is not attached by this connection; attach first"));
  }
  return optimizer;
}

grpc::Status OptimizerServiceImpl::CreateOptimizer(grpc::ServerContext* context,
                                                   const v1::CreateOptimizerRequest* request, v1::Optimizer* response) {
  absl::StatusOr<transport::Peer> peer = AuthenticateTrainer(*context);
  if (!peer.ok()) return ToGrpc(peer.status());
  absl::StatusOr<engine::OptimizerSpec> spec = ToSpec(*request);
  if (!spec.ok()) return ToGrpc(spec.status());
  absl::StatusOr<Policies> policies = ToPolicies(request->policies());
  if (!policies.ok()) return ToGrpc(policies.status());
  if (absl::Status status = scheduler_->CheckDirectory({peer->uid, request->name()}, policies->schedule); !status.ok()) {
    return ToGrpc(status);
  }
  absl::StatusOr<optimizer::OptimizerPtr> optimizer =
      table_->Create(*peer, request->name(), *std::move(spec), policies->speculation, Describe(peer->uid, *request));
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  ApplyPolicies(*table_, *scheduler_, *optimizer, *policies);
  *response = Show(**optimizer, Details::kBasic);
  return grpc::Status::OK;
}

grpc::ServerUnaryReactor* OptimizerServiceImpl::GetOptimizer(grpc::CallbackServerContext* context,
                                                             const v1::GetOptimizerRequest* request,
                                                             v1::Optimizer* response) {
  auto* const answer = new Answer;
  absl::StatusOr<transport::Peer> peer = Authenticate(*context);
  absl::StatusOr<optimizer::OptimizerPtr> optimizer =
      peer.ok() ? table_->Get(*peer, request->name()) : absl::StatusOr<optimizer::OptimizerPtr>(peer.status());
  absl::Status status = optimizer.status();
  const bool full = request->view() == v1::OPTIMIZER_VIEW_FULL;
  if (status.ok() && full) status = answer->Take(large_answers_, peer->uid);
  if (status.ok()) *response = Show(**optimizer, full ? Details::kFull : Details::kBasic);
  answer->Finish(ToGrpc(status));
  return answer;
}

grpc::Status OptimizerServiceImpl::ListOptimizers(grpc::ServerContext* context,
                                                  const v1::ListOptimizersRequest* request,
                                                  v1::ListOptimizersResponse* response) {
  absl::StatusOr<transport::Peer> peer = Authenticate(*context);
  if (!peer.ok()) return ToGrpc(peer.status());
  std::map<optimizer::OptimizerId, std::function<v1::Optimizer()>> visible;
  for (const optimizer::OptimizerPtr& optimizer : table_->List(*peer)) {
    visible[optimizer->id()] = [this, optimizer] { return Show(*optimizer, Details::kListed); };
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
  for (; next != visible.end() && response->optimizers_size() < page_size; ++next) {
    *response->add_optimizers() = next->second();
  }
  if (next != visible.end()) response->set_next_page_token(PageToken(std::prev(next)->first));
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::DeleteOptimizer(grpc::ServerContext* context,
                                                   const v1::DeleteOptimizerRequest* request,
                                                   v1::DeleteOptimizerResponse*) {
  absl::StatusOr<transport::Peer> peer = Authenticate(*context);
  if (!peer.ok()) return ToGrpc(peer.status());
  return ToGrpc(table_->Delete(*peer, request->name()));
}

grpc::Status OptimizerServiceImpl::DetachOptimizer(grpc::ServerContext* context,
                                                   const v1::DetachOptimizerRequest* request,
                                                   v1::DetachOptimizerResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = FindAttached(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  const uint64_t epoch = (*optimizer)->attachment().epoch;
  (*optimizer)->RequestDetach(epoch, absl::CancelledError("the trainer detached"));
  (*optimizer)->WaitDetached(epoch);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::PushParameters(grpc::ServerContext* context,
                                                  const v1::PushParametersRequest* request,
                                                  v1::PushParametersResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = FindAttached(*context, request->name());
  return ToGrpc(optimizer.ok() ? (*optimizer)->engine().WaitPushed() : optimizer.status());
}

grpc::Status OptimizerServiceImpl::PullParameters(grpc::ServerContext* context,
                                                  const v1::PullParametersRequest* request,
                                                  v1::PullParametersResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = FindAttached(*context, request->name());
  return ToGrpc(optimizer.ok() ? (*optimizer)->engine().WaitPulled() : optimizer.status());
}

grpc::Status OptimizerServiceImpl::SettleOptimizer(grpc::ServerContext* context,
                                                   const v1::SettleOptimizerRequest* request, v1::Optimizer* response) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = Find(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  if (absl::Status status = (*optimizer)->engine().WaitSettled(); !status.ok()) return ToGrpc(status);
  *response = Show(**optimizer, Details::kBasic);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::UpdatePolicies(grpc::ServerContext* context,
                                                  const v1::UpdatePoliciesRequest* request, v1::Optimizer* response) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = Find(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  absl::StatusOr<Policies> policies = ToPolicies(request->policies());
  if (!policies.ok()) return ToGrpc(policies.status());
  if (absl::Status status = scheduler_->CheckDirectory((*optimizer)->id(), policies->schedule); !status.ok()) {
    return ToGrpc(status);
  }
  if (absl::Status status = RememberPolicies(**optimizer, request->policies()); !status.ok()) return ToGrpc(status);
  (*optimizer)->engine().SetPolicy(policies->speculation);
  ApplyPolicies(*table_, *scheduler_, *optimizer, *policies);
  *response = Show(**optimizer, Details::kBasic);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::ReportGpu(grpc::ServerContext* context, const v1::ReportGpuRequest* request,
                                             v1::ReportGpuResponse*) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = FindAttached(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  absl::StatusOr<optimizer::GpuUse> use = ToGpuUse(request->use());
  if (!use.ok()) return ToGrpc(use.status());
  (*optimizer)->SetGpuUse(*std::move(use));
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::CheckpointOptimizer(grpc::ServerContext* context,
                                                       const v1::CheckpointOptimizerRequest* request,
                                                       grpc::ServerWriter<v1::CheckpointProgress>* writer) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = Find(*context, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  const auto operation = file_operations_.Begin((*optimizer)->id().uid);
  if (!operation.ok()) return ToGrpc(operation.status());
  checkpoint::Progress progress;
  std::atomic<bool> cancelled{false};
  absl::Notification done;
  optimizer::CheckpointReport report;
  absl::StatusOr<std::thread> thread = memory::StartThread("so-checkpoint", [&] {
    const absl::Status acted = checkpoint::RunAs((*optimizer)->id().uid, [&] {
      const checkpoint::WriteOptions options{.directory = [&](uint64_t) { return request->directory(); }};
      report = checkpoint::WriteCheckpoint(**optimizer, options, cancelled, &progress);
      return absl::OkStatus();
    });
    report.status.Update(acted);
    done.Notify();
  });
  if (!thread.ok()) return ToGrpc(thread.status());
  v1::CheckpointProgress message;
  while (!done.WaitForNotificationWithTimeout(kProgressInterval)) {
    message.set_committed_steps(progress.committed_steps);
    message.set_bytes_written(progress.bytes_written);
    message.set_bytes_total(progress.bytes_total);
    if ((context->IsCancelled() || stopping_ || !writer->Write(message)) && !cancelled.exchange(true)) {
      (*optimizer)->engine().WakeSnapshot();
    }
  }
  thread->join();
  observer_->OnCheckpoint((*optimizer)->id(), report);
  if (!report.status.ok()) return ToGrpc(report.status);
  message.set_committed_steps(report.committed_steps);
  message.set_bytes_written(report.bytes);
  message.set_bytes_total(report.bytes);
  message.set_directory(report.directory);
  writer->Write(message);
  return grpc::Status::OK;
}

grpc::Status OptimizerServiceImpl::RestoreOptimizer(grpc::ServerContext* context,
                                                    const v1::RestoreOptimizerRequest* request,
                                                    v1::Optimizer* response) {
  absl::StatusOr<transport::Peer> peer = Authenticate(*context);
  if (!peer.ok()) return ToGrpc(peer.status());
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Get(*peer, request->name());
  if (!optimizer.ok()) return ToGrpc(optimizer.status());
  const auto operation = file_operations_.Begin((*optimizer)->id().uid);
  if (!operation.ok()) return ToGrpc(operation.status());
  absl::StatusOr<uint64_t> epoch = table_->NewEpoch();
  if (!epoch.ok()) return ToGrpc(epoch.status());
  const std::vector<std::string> directories(request->directories().begin(), request->directories().end());
  const absl::Status restored = checkpoint::RunAs((*optimizer)->id().uid, [&] {
    return checkpoint::RestoreCheckpoint(**optimizer, {*epoch, *peer, std::nullopt}, directories);
  });
  if (!restored.ok()) return ToGrpc(restored);
  *response = Show(**optimizer, Details::kBasic);
  return grpc::Status::OK;
}

grpc::ServerWriteReactor<v1::AttachOptimizerResponse>* OptimizerServiceImpl::AttachOptimizer(
    grpc::CallbackServerContext* context, const v1::AttachOptimizerRequest* request) {
  absl::StatusOr<transport::Peer> peer = AuthenticateTrainer(*context);
  if (!peer.ok()) return new FailedStream<v1::AttachOptimizerResponse>(peer.status());
  return new AttachReactor(table_, scheduler_, *peer, *request);
}

grpc::ServerWriteReactor<v1::StepReport>* OptimizerServiceImpl::WatchSteps(grpc::CallbackServerContext* context,
                                                                           const v1::WatchStepsRequest* request) {
  absl::StatusOr<transport::Peer> peer = Authenticate(*context);
  if (!peer.ok()) return new FailedStream<v1::StepReport>(peer.status());
  std::optional<optimizer::OptimizerId> only;
  if (!request->name().empty()) {
    absl::StatusOr<optimizer::OptimizerPtr> found = table_->Get(*peer, request->name());
    if (!found.ok()) return new FailedStream<v1::StepReport>(found.status());
    only = (*found)->id();
  }
  return WatchReactor::Start(hub_, [peer = *peer, only](const optimizer::OptimizerId& id) {
    return optimizer::OptimizerTable::MaySee(peer, id) && (!only || *only == id);
  });
}

}  // namespace superoffload::rpc
