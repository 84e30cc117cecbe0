#include "server/host/control_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/host/config.h"
#include "server/host/descriptor_limit.h"
#include "server/host/log.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::host {
namespace {

// What the users of a server have under way: messages that are on their way in, calls, and threads that serve them.
constexpr size_t kServerBytes = 64 << 20;
constexpr int kServerThreads = 64;

// Of users who may not use the daemon, whose calls have next to no arguments.
constexpr int kMaxStrangersMessageBytes = 64 << 10;
constexpr size_t kStrangersBytes = 32 << 20;

// What is left of streams and calls when the optimizers are settled has nothing to wait for.
constexpr std::chrono::milliseconds kShutdownGrace{500};

// Without a token of the user whose connection it is, no message of a call is even received.
absl::Status MayCall(const transport::DescriptorServer& descriptors, std::optional<uid_t> uid,
                     const std::string& method, const std::string& token) {
  if (!absl::StartsWith(method, "/superoffload.v1.OptimizerService/")) return absl::OkStatus();
  const absl::StatusOr<transport::Peer> peer = descriptors.Authenticate(token);
  if (!peer.ok()) return peer.status();
  if (!uid || *uid == peer->uid) return absl::OkStatus();
  return absl::UnauthenticatedError(absl::StrCat("the token is that of another user than uid ", *uid,
                                                 ", who made this connection; say HELLO on the descriptor socket"));
}

absl::Status NoServer() { return absl::UnavailableError("cannot serve gRPC; see the lines above"); }

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MutualTls(const v1::RemoteOperators& remote) {
  absl::StatusOr<std::string> authority = ReadFile(remote.client_authority_file());
  absl::StatusOr<std::string> certificate = ReadFile(remote.certificate_file());
  absl::StatusOr<std::string> key = ReadFile(remote.key_file());
  for (const auto* file : {&authority, &certificate, &key}) {
    if (!file->ok()) return file->status();
  }
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = *authority;
  options.pem_key_cert_pairs.push_back({*key, *certificate});
  return grpc::SslServerCredentials(options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Serve(const v1::DaemonConfig& config,
                                                                    memory::FileDescriptor listener, Sources sources) {
  std::unique_ptr<ControlServer> server(new ControlServer(config.control_calls_per_second(), std::move(sources)));
  if (absl::Status status = server->Start(config, std::move(listener)); !status.ok()) return status;
  return server;
}

ControlServer::ControlServer(uint32_t calls_per_second, Sources sources)
    : descriptors_(sources.descriptors),
      server_service_(sources.info, sources.topology),
      optimizer_service_(sources.table, sources.scheduler, sources.hub, sources.observer, sources.descriptors,
                         calls_per_second) {}

absl::Status ControlServer::Start(const v1::DaemonConfig& config, memory::FileDescriptor listener) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  // Each user has a server of its own as long as there are no more users. One that nobody uses costs a thread.
  std::vector<grpc::ServerBuilder> builders(ConnectionAcceptor::kListeners);
  grpc::ServerBuilder strangers_builder;
  CallLimits calls;
  calls.calls =
      std::max<double>(calls.calls, 2 * config.control_calls_per_second());  // what is slowed down is not refused
  absl::StatusOr<std::unique_ptr<ConnectionRelay>> relay = ConnectionRelay::Start(ControlConnectionLimits(), calls);
  if (!relay.ok()) return relay.status();
  acceptor_ = std::make_unique<ConnectionAcceptor>(
      std::move(listener), *std::move(relay),
      [this](std::optional<uid_t> uid, const std::string& method, const std::string& token) {
        return MayCall(*descriptors_, uid, method, token);
      },
      [this](uid_t uid) { return descriptors_->Allows(uid); }, builders, strangers_builder);
  for (grpc::ServerBuilder& builder : builders) {
    if (absl::Status status = StartServer(builder); !status.ok()) return status;
  }
  strangers_builder.SetMaxReceiveMessageSize(kMaxStrangersMessageBytes);
  strangers_builder.SetResourceQuota(
      grpc::ResourceQuota("strangers").Resize(kStrangersBytes).SetMaxThreads(kServerThreads));
  strangers_builder.RegisterService(&server_service_);
  servers_.push_back(strangers_builder.BuildAndStart());
  if (servers_.back() == nullptr) return NoServer();
  if (absl::Status status = ServeRemote(config); !status.ok()) return status;
  acceptor_->Start();
  return absl::OkStatus();
}

absl::Status ControlServer::StartServer(grpc::ServerBuilder& builder) {
  builder.SetMaxReceiveMessageSize(SUPEROFFLOAD_MAX_MESSAGE_BYTES);
  builder.SetResourceQuota(grpc::ResourceQuota("users").Resize(kServerBytes).SetMaxThreads(kServerThreads));
  builder.RegisterService(&server_service_);
  builder.RegisterService(&optimizer_service_);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return NoServer();
  servers_.push_back(std::move(server));
  return absl::OkStatus();
}

absl::Status ControlServer::ServeRemote(const v1::DaemonConfig& config) {
  if (!config.has_remote_operators()) return absl::OkStatus();
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials = MutualTls(config.remote_operators());
  if (!credentials.ok()) return credentials.status();
  const std::string& address = config.remote_operators().address();
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, *credentials, &port);
  if (!StartServer(builder).ok() || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on remote_operators.address ", address, "; choose a free host:port"));
  }
  LogInfo(absl::StrCat("operators with a certificate are served on TCP port ", port));
  return absl::OkStatus();
}

void ControlServer::BeginShutdown() {
  for (const std::unique_ptr<grpc::Server>& server : servers_) {
    server->GetHealthCheckService()->SetServingStatus(false);
  }
  optimizer_service_.CancelCheckpoints();
}

void ControlServer::Shutdown() {
  const auto deadline = std::chrono::system_clock::now() + kShutdownGrace;
  for (const std::unique_ptr<grpc::Server>& server : servers_) server->Shutdown(deadline);
  for (const std::unique_ptr<grpc::Server>& server : servers_) server->Wait();
  acceptor_.reset();
}

}  // namespace superoffload::host
