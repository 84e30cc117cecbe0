#include "superoffload/client.hpp"

#include <grpcpp/security/credentials.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/src/connect_patience.h"
#include "client/src/cpp/calls.h"
#include "client/src/cpp/pages.h"
#include "client/src/cpp/session.h"

namespace superoffload {
namespace {

using Stub = v1::OptimizerService::Stub;

constexpr std::chrono::milliseconds kRetryPause{20};

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (file && text << file.rdbuf()) return text.str();
  return absl::NotFoundError(absl::StrCat("cannot read ", path));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& endpoint) {
  absl::StatusOr<std::string> resolved = ResolveEndpoint(endpoint);
  if (!resolved.ok()) return resolved.status();
  absl::StatusOr<std::shared_ptr<Session>> session =
      Session::Open(*resolved, grpc::InsecureChannelCredentials(), /*local=*/true);
  if (!session.ok()) return session.status();
  return std::unique_ptr<Client>(new Client(*std::move(resolved), *std::move(session)));
}

absl::StatusOr<std::unique_ptr<Client>> Client::ConnectRemote(const std::string& endpoint, const TlsFiles& tls) {
  const absl::StatusOr<std::string> files[] = {ReadFile(tls.authority), ReadFile(tls.key), ReadFile(tls.certificate)};
  for (const absl::StatusOr<std::string>& file : files) {
    if (!file.ok()) return file.status();
  }
  absl::StatusOr<std::shared_ptr<Session>> session =
      Session::Open(endpoint, grpc::SslCredentials({*files[0], *files[1], *files[2]}), /*local=*/false);
  if (!session.ok()) return session.status();
  return std::unique_ptr<Client>(new Client(endpoint, *std::move(session)));
}

Client::Client(std::string endpoint, std::shared_ptr<Session> session)
    : endpoint_(std::move(endpoint)), session_(std::move(session)) {}

Client::~Client() = default;

std::shared_ptr<Session> Client::session() const {
  const std::lock_guard lock(mutex_);
  return session_;
}

// A daemon that was stopped on purpose takes its socket away.
absl::StatusOr<std::shared_ptr<Session>> Client::WaitSuccessor(const Session* dead) {
  const auto begin = std::chrono::steady_clock::now();
  auto socket_deadline = begin + client::SocketPatience();
  const std::string socket(absl::StripPrefix(endpoint_, "unix:"));
  while (true) {
    if (std::shared_ptr<Session> present = session(); present.get() != dead) return present;
    absl::StatusOr<std::shared_ptr<Session>> opened =
        Session::Open(endpoint_, grpc::InsecureChannelCredentials(), /*local=*/true);
    if (opened.ok()) {
      const std::lock_guard lock(mutex_);
      if (session_.get() == dead) session_ = *opened;
      return session_;
    }
    if (!absl::IsUnavailable(opened.status())) return opened.status();
    const auto now = std::chrono::steady_clock::now();
    std::error_code unknown;
    if (std::filesystem::exists(socket, unknown)) socket_deadline = now + client::SocketPatience();
    if (now > std::min(begin + client::ReconnectPatience(), socket_deadline)) {
      return absl::UnavailableError(absl::StrCat(
          "superoffloadd at ", endpoint_, " has stopped, and no other has come (", opened.status().message(),
          "); start it again, and then this trainer, which finds its optimizer by "
          "name where the daemon or its keeper has kept it"));
    }
    std::this_thread::sleep_for(kRetryPause);
  }
}

absl::StatusOr<v1::Topology> Client::GetTopology() {
  return Call(session()->server(), &v1::ServerService::Stub::GetTopology, session()->token(), v1::GetTopologyRequest());
}

absl::StatusOr<v1::ServerInfo> Client::GetServerInfo() { return session()->GetServerInfo(); }

absl::StatusOr<v1::Optimizer> Client::CreateOptimizer(const v1::CreateOptimizerRequest& request) {
  const std::shared_ptr<Session> present = session();
  CallContext context(present->token());
  v1::Optimizer optimizer;
  const auto writer = present->optimizers().CreateOptimizer(&context, &optimizer);
  WritePages(request, [&](const v1::CreateOptimizerRequest& page) { return writer->Write(page); });
  writer->WritesDone();
  if (grpc::Status status = writer->Finish(); !status.ok()) return FromGrpc(status);
  return optimizer;
}

absl::StatusOr<v1::Optimizer> Client::GetOptimizer(const std::string& name, v1::OptimizerView view) {
  return session()->GetOptimizer(name, view);
}

absl::StatusOr<std::vector<v1::Optimizer>> Client::ListOptimizers() {
  std::vector<v1::Optimizer> all;
  v1::ListOptimizersRequest request;
  do {
    absl::StatusOr<v1::ListOptimizersResponse> page = session()->Ask(&Stub::ListOptimizers, request);
    if (!page.ok()) return page.status();
    all.insert(all.end(), page->optimizers().begin(), page->optimizers().end());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return all;
}

absl::Status Client::DeleteOptimizer(const std::string& name) {
  return session()->Ask(&Stub::DeleteOptimizer, Named<v1::DeleteOptimizerRequest>(name)).status();
}

absl::StatusOr<v1::Optimizer> Client::SettleOptimizer(const std::string& name) {
  return session()->Ask(&Stub::SettleOptimizer, Named<v1::SettleOptimizerRequest>(name));
}

absl::StatusOr<v1::Optimizer> Client::UpdatePolicies(const std::string& name, const v1::Policies& policies) {
  auto request = Named<v1::UpdatePoliciesRequest>(name);
  *request.mutable_policies() = policies;
  return session()->Ask(&Stub::UpdatePolicies, request);
}

absl::StatusOr<v1::CheckpointProgress> Client::CheckpointOptimizer(
    const std::string& name, const std::string& directory,
    const std::function<bool(const v1::CheckpointProgress&)>& on_progress, std::optional<uint64_t> run_step) {
  const std::shared_ptr<Session> present = session();
  CallContext context(present->token());
  auto request = Named<v1::CheckpointOptimizerRequest>(name);
  request.set_directory(directory);
  if (run_step) request.set_run_step(*run_step);
  const auto reader = present->optimizers().CheckpointOptimizer(&context, request);
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
  return session()->Ask(&Stub::ExportOptimizer, request);
}

absl::StatusOr<v1::Optimizer> Client::RestoreOptimizer(const std::string& name,
                                                       const std::vector<std::string>& directories) {
  auto request = Named<v1::RestoreOptimizerRequest>(name);
  for (const std::string& directory : directories) request.add_directories(directory);
  return session()->Ask(&Stub::RestoreOptimizer, request);
}

absl::Status Client::WatchSteps(const std::string& name, const std::function<bool(const v1::StepReport&)>& on_report) {
  const std::shared_ptr<Session> present = session();
  CallContext context(present->token());
  const auto reader = present->optimizers().WatchSteps(&context, Named<v1::WatchStepsRequest>(name));
  for (v1::StepReport report; reader->Read(&report);) {
    if (on_report(report)) continue;
    context.TryCancel();
    reader->Finish();
    return absl::OkStatus();
  }
  return FromGrpc(reader->Finish());
}

absl::StatusOr<std::unique_ptr<Attachment>> Client::Attach(const v1::AttachOptimizerRequest& request,
                                                           const StreamedUnits& streamed) {
  v1::AttachOptimizerResponse response;
  absl::StatusOr<std::unique_ptr<AttachmentStream>> stream = AttachmentStream::Open(session(), request, &response);
  if (!stream.ok()) return stream.status();
  std::unique_ptr<Attachment> attachment(new Attachment(this, response.optimizer()));
  if (absl::Status status = attachment->Begin(*std::move(stream), response, streamed); !status.ok()) return status;
  return attachment;
}

}  // namespace superoffload
