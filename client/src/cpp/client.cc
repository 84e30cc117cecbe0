#include "superoffload/client.hpp"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/connect_patience.h"
#include "client/src/cpp/attachment_stream.h"
#include "client/src/cpp/calls.h"
#include "client/src/cpp/pages.h"

namespace superoffload {
namespace {

using Stub = v1::OptimizerService::Stub;

// gRPC gives up a connection that stays silent for 20 seconds, whatever a call's time is.
std::shared_ptr<grpc::Channel> OpenChannel(const std::string& endpoint,
                                           const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(client::ConnectPatience().count()));
  return grpc::CreateCustomChannel(endpoint, credentials, arguments);
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file && text << file.rdbuf()) return text.str();
  return absl::NotFoundError(absl::StrCat("cannot read ", path));
}

// A user has so many pages on their way at once; another trainer's are over soon.
constexpr std::chrono::seconds kPagePatience{30};
constexpr std::chrono::milliseconds kPagePause{20};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& endpoint) {
  absl::StatusOr<std::string> resolved = ResolveEndpoint(endpoint);
  if (!resolved.ok()) return resolved.status();
  std::unique_ptr<Client> client(new Client(*std::move(resolved), grpc::InsecureChannelCredentials()));
  absl::StatusOr<v1::ServerInfo> info = client->FindServer();
  if (!info.ok()) return info.status();
  if (absl::Status status = client->ConnectDescriptors(*info); !status.ok()) return status;
  return client;
}

absl::StatusOr<std::unique_ptr<Client>> Client::ConnectRemote(const std::string& endpoint, const TlsFiles& tls) {
  const absl::StatusOr<std::string> files[] = {ReadFile(tls.authority), ReadFile(tls.key), ReadFile(tls.certificate)};
  for (const absl::StatusOr<std::string>& file : files) {
    if (!file.ok()) return file.status();
  }
  std::unique_ptr<Client> client(new Client(endpoint, grpc::SslCredentials({*files[0], *files[1], *files[2]})));
  if (absl::StatusOr<v1::ServerInfo> info = client->FindServer(); !info.ok()) return info.status();
  return client;
}

Client::Client(std::string endpoint, const std::shared_ptr<grpc::ChannelCredentials>& credentials)
    : endpoint_(std::move(endpoint)),
      channel_(OpenChannel(endpoint_, credentials)),
      server_(v1::ServerService::NewStub(channel_)),
      optimizers_(v1::OptimizerService::NewStub(channel_)) {}

Client::~Client() { superoffload_disconnect(connection_); }

absl::StatusOr<v1::ServerInfo> Client::FindServer() {
  absl::StatusOr<v1::ServerInfo> info = GetServerInfo();
  if (info.ok()) return info;
  return absl::Status(info.status().code(),
                      absl::StrCat("no superoffloadd answers at ", endpoint_, ": ", info.status().message()));
}

absl::Status Client::ConnectDescriptors(const v1::ServerInfo& info) {
  if (int code = superoffload_connect(info.descriptor_socket().c_str(), &connection_); code != 0) return FromC(code);
  token_ = superoffload_token(connection_);
  return absl::OkStatus();
}

absl::StatusOr<v1::Topology> Client::GetTopology() {
  return Call(*server_, &v1::ServerService::Stub::GetTopology, token_, v1::GetTopologyRequest());
}

absl::StatusOr<v1::ServerInfo> Client::GetServerInfo() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + client::ConnectPatience());
  v1::ServerInfo info;
  if (grpc::Status status = server_->GetServerInfo(&context, {}, &info); !status.ok()) return FromGrpc(status);
  return info;
}

absl::StatusOr<v1::Optimizer> Client::CreateOptimizer(const v1::CreateOptimizerRequest& request) {
  CallContext context(token_);
  v1::Optimizer optimizer;
  const auto writer = optimizers_->CreateOptimizer(&context, &optimizer);
  WritePages(request, [&](const v1::CreateOptimizerRequest& page) { return writer->Write(page); });
  writer->WritesDone();
  if (grpc::Status status = writer->Finish(); !status.ok()) return FromGrpc(status);
  return optimizer;
}

absl::StatusOr<v1::Optimizer> Client::GetOptimizer(const std::string& name, v1::OptimizerView view) {
  auto request = Named<v1::GetOptimizerRequest>(name);
  request.set_view(view);
  v1::Optimizer whole;
  const auto deadline = std::chrono::steady_clock::now() + kPagePatience;
  while (true) {
    absl::StatusOr<v1::Optimizer> page = Call(*optimizers_, &Stub::GetOptimizer, token_, request);
    if (absl::IsResourceExhausted(page.status()) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPagePause);
      continue;
    }
    if (!page.ok()) return page.status();
    request.set_page_token(page->next_page_token());
    page->clear_next_page_token();
    whole.MergeFrom(*page);
    if (request.page_token().empty()) return whole;
  }
}

absl::StatusOr<std::vector<v1::Optimizer>> Client::ListOptimizers() {
  std::vector<v1::Optimizer> all;
  v1::ListOptimizersRequest request;
  do {
    absl::StatusOr<v1::ListOptimizersResponse> page = Call(*optimizers_, &Stub::ListOptimizers, token_, request);
    if (!page.ok()) return page.status();
    all.insert(all.end(), page->optimizers().begin(), page->optimizers().end());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return all;
}

absl::Status Client::DeleteOptimizer(const std::string& name) {
  return Call(*optimizers_, &Stub::DeleteOptimizer, token_, Named<v1::DeleteOptimizerRequest>(name)).status();
}

absl::StatusOr<v1::Optimizer> Client::SettleOptimizer(const std::string& name) {
  return Call(*optimizers_, &Stub::SettleOptimizer, token_, Named<v1::SettleOptimizerRequest>(name));
}

absl::StatusOr<v1::Optimizer> Client::UpdatePolicies(const std::string& name, const v1::Policies& policies) {
  auto request = Named<v1::UpdatePoliciesRequest>(name);
  *request.mutable_policies() = policies;
  return Call(*optimizers_, &Stub::UpdatePolicies, token_, request);
}

absl::StatusOr<v1::CheckpointProgress> Client::CheckpointOptimizer(
    const std::string& name, const std::string& directory,
    const std::function<bool(const v1::CheckpointProgress&)>& on_progress, std::optional<uint64_t> run_step) {
  CallContext context(token_);
  auto request = Named<v1::CheckpointOptimizerRequest>(name);
  request.set_directory(directory);
  if (run_step) request.set_run_step(*run_step);
  const auto reader = optimizers_->CheckpointOptimizer(&context, request);
  v1::CheckpointProgress progress;
  while (reader->Read(&progress)) {
    if (!on_progress(progress)) context.TryCancel();
  }
  if (grpc::Status status = reader->Finish(); !status.ok()) return FromGrpc(status);
  return progress;
}

absl::StatusOr<v1::ExportOptimizerResponse> Client::ExportOptimizer(const std::string& name,
                                                                    const std::string& directory) {
  auto request = Named<v1::ExportOptimizerRequest>(name);
  request.set_directory(directory);
  return Call(*optimizers_, &Stub::ExportOptimizer, token_, request);
}

absl::StatusOr<v1::Optimizer> Client::RestoreOptimizer(const std::string& name,
                                                       const std::vector<std::string>& directories) {
  auto request = Named<v1::RestoreOptimizerRequest>(name);
  for (const std::string& directory : directories) request.add_directories(directory);
  return Call(*optimizers_, &Stub::RestoreOptimizer, token_, request);
}

absl::Status Client::WatchSteps(const std::string& name, const std::function<bool(const v1::StepReport&)>& on_report) {
  CallContext context(token_);
  const auto reader = optimizers_->WatchSteps(&context, Named<v1::WatchStepsRequest>(name));
  for (v1::StepReport report; reader->Read(&report);) {
    if (on_report(report)) continue;
    context.TryCancel();
    reader->Finish();
    return absl::OkStatus();
  }
  return FromGrpc(reader->Finish());
}

absl::StatusOr<std::unique_ptr<Attachment>> Client::Attach(const v1::AttachOptimizerRequest& request) {
  auto stream = std::make_unique<Attachment::Stream>(token_);
  stream->messages = optimizers_->AttachOptimizer(&stream->context);
  WritePages(request, [&](const v1::AttachOptimizerRequest& page) { return stream->messages->Write(page); });
  stream->messages->WritesDone();
  v1::AttachOptimizerResponse response;
  if (!stream->messages->Read(&response)) return FromGrpc(std::exchange(stream->messages, nullptr)->Finish());
  absl::StatusOr<v1::Optimizer> whole = GetOptimizer(request.name(), v1::OPTIMIZER_VIEW_FULL);
  if (!whole.ok()) return whole.status();
  *response.mutable_optimizer() = *std::move(whole);
  std::unique_ptr<Attachment> attachment(new Attachment(optimizers_.get(), token_, response, std::move(stream)));
  if (absl::Status status = attachment->Map(connection_, response); !status.ok()) return status;
  return attachment;
}

}  // namespace superoffload
