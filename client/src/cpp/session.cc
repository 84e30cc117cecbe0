#include "client/src/cpp/session.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/connect_patience.h"
#include "client/src/cpp/pages.h"

namespace superoffload {
namespace {

using Stub = v1::OptimizerService::Stub;

// A user has so many pages on their way at once; another trainer's are over soon.
constexpr std::chrono::seconds kPagePatience{30};
constexpr std::chrono::milliseconds kPagePause{20};

// gRPC gives up a connection that stays silent for 20 seconds, whatever a call's time is. It shares connections among
// channels, and lets all of them wait for a second or more once an attempt has failed.
std::shared_ptr<grpc::Channel> OpenChannel(const std::string& endpoint,
                                           const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, static_cast<int>(client::ConnectPatience().count()));
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(endpoint, credentials, arguments);
}

}  // namespace

Session::Session(std::shared_ptr<grpc::Channel> channel)
    : channel_(std::move(channel)),
      server_(v1::ServerService::NewStub(channel_)),
      optimizers_(v1::OptimizerService::NewStub(channel_)) {}

absl::StatusOr<std::shared_ptr<Session>> Session::Open(const std::string& endpoint,
                                                       const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                                       bool local) {
  std::shared_ptr<Session> session(new Session(OpenChannel(endpoint, credentials)));
  const absl::StatusOr<v1::ServerInfo> info = session->GetServerInfo();
  if (!info.ok()) {
    return absl::Status(info.status().code(),
                        absl::StrCat("no superoffloadd answers at ", endpoint, ": ", info.status().message()));
  }
  if (!local) return session;
  char token[65];
  const int code = superoffload_connect(info->descriptor_socket().c_str(), &session->connection_, token);
  if (code != 0) return FromC(code);
  session->token_ = token;
  return session;
}

absl::StatusOr<v1::ServerInfo> Session::GetServerInfo() const {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + client::ConnectPatience());
  v1::ServerInfo info;
  if (grpc::Status status = server_->GetServerInfo(&context, {}, &info); !status.ok()) return FromGrpc(status);
  return info;
}

absl::StatusOr<v1::Optimizer> Session::GetOptimizer(const std::string& name, v1::OptimizerView view) const {
  auto request = Named<v1::GetOptimizerRequest>(name);
  request.set_view(view);
  v1::Optimizer whole;
  const auto deadline = std::chrono::steady_clock::now() + kPagePatience;
  while (true) {
    absl::StatusOr<v1::Optimizer> page = Ask(&Stub::GetOptimizer, request);
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

absl::StatusOr<std::unique_ptr<AttachmentStream>> AttachmentStream::Open(std::shared_ptr<Session> session,
                                                                         const v1::AttachOptimizerRequest& request,
                                                                         v1::AttachOptimizerResponse* response) {
  std::unique_ptr<AttachmentStream> stream(new AttachmentStream(std::move(session)));
  stream->messages_ = stream->session().optimizers().AttachOptimizer(&stream->context_);
  WritePages(request, [&](const v1::AttachOptimizerRequest& page) { return stream->messages_->Write(page); });
  stream->messages_->WritesDone();
  if (!stream->messages_->Read(response)) return FromGrpc(std::exchange(stream->messages_, nullptr)->Finish());
  absl::StatusOr<v1::Optimizer> whole = stream->session().GetOptimizer(request.name(), v1::OPTIMIZER_VIEW_FULL);
  if (!whole.ok()) return whole.status();
  *response->mutable_optimizer() = *std::move(whole);
  return stream;
}

AttachmentStream::~AttachmentStream() {
  context_.TryCancel();
  if (messages_ != nullptr) messages_->Finish();
}

}  // namespace superoffload
