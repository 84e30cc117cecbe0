#include "server/rpc/callers.h"

#include <grpc/grpc_security_constants.h>

#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "superoffload/v1/optimizer.grpc.pb.h"

namespace superoffload::rpc {
namespace {

// Has no session: those are numbered from 1.
constexpr transport::Peer kRemoteOperator{.session = 0, .uid = 0, .pid = 0, .is_operator = true};

// The listener for TCP demands a certificate of the operators' authority (server/host/control_server.cc).
bool IsRemoteOperator(const grpc::ServerContextBase& context) {
  const std::vector<grpc::string_ref> type =
      context.auth_context()->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  return type.size() == 1 && type.front() == GRPC_SSL_TRANSPORT_SECURITY_TYPE &&
         context.auth_context()->IsPeerAuthenticated();
}

}  // namespace

absl::StatusOr<transport::Peer> Callers::Authenticate(const grpc::ServerContextBase& context) const {
  if (IsRemoteOperator(context)) return kRemoteOperator;
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find(SUPEROFFLOAD_TOKEN_METADATA_KEY);
  absl::StatusOr<transport::Peer> peer =
      descriptors_->Authenticate(it == metadata.end() ? "" : std::string(it->second.data(), it->second.size()));
  if (!peer.ok()) return peer;
  if (absl::Status status = quota_.Take(peer->uid, absl::Now()); !status.ok()) return status;
  return peer;
}

absl::StatusOr<transport::Peer> Callers::AuthenticateTrainer(const grpc::ServerContextBase& context) const {
  absl::StatusOr<transport::Peer> peer = Authenticate(context);
  if (!peer.ok() || peer->session != kRemoteOperator.session) return peer;
  return absl::FailedPreconditionError(
      "optimizers are created and attached by processes on the daemon's machine, over its unix socket");
}

absl::StatusOr<optimizer::OptimizerPtr> Callers::Find(const grpc::ServerContextBase& context,
                                                      const std::string& name) const {
  absl::StatusOr<transport::Peer> peer = Authenticate(context);
  if (!peer.ok()) return peer.status();
  return table_->Get(*peer, name);
}

absl::StatusOr<optimizer::OptimizerPtr> Callers::FindAttached(const grpc::ServerContextBase& context,
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

absl::Status Callers::Exclusively(
    const grpc::ServerContextBase& context, const std::string& name,
    const std::function<absl::Status(optimizer::HostedOptimizer&, const optimizer::AttachedTrainer&)>& body) const {
  absl::StatusOr<transport::Peer> peer = Authenticate(context);
  if (!peer.ok()) return peer.status();
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Get(*peer, name);
  if (!optimizer.ok()) return optimizer.status();
  absl::StatusOr<uint64_t> epoch = table_->NewEpoch();
  if (!epoch.ok()) return epoch.status();
  return body(**optimizer, {*epoch, *peer, std::nullopt});
}

}  // namespace superoffload::rpc
