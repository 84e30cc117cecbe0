// One daemon as a process talks to it: a gRPC channel, and the connection that attachments get their memory through. It
// ends with the daemon; the next one has another.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CPP_SESSION_H_
#define SUPEROFFLOAD_CLIENT_SRC_CPP_SESSION_H_

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/sync_stream.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/cpp/calls.h"
#include "superoffload/client.hpp"
#include "superoffload/superoffload.h"

namespace superoffload {

class Session {
 public:
  // `local`: with the connection for attachments. UNAVAILABLE: nobody listens there.
  static absl::StatusOr<std::shared_ptr<Session>> Open(const std::string& endpoint,
                                                       const std::shared_ptr<grpc::ChannelCredentials>& credentials,
                                                       bool local);
  ~Session() { superoffload_disconnect(connection_); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  v1::ServerService::Stub& server() const { return *server_; }
  v1::OptimizerService::Stub& optimizers() const { return *optimizers_; }
  superoffload_connection* connection() const { return connection_; }
  const std::string& token() const { return token_; }

  // One unary call about optimizers.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Ask(grpc::Status (v1::OptimizerService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                                  Response*),
                               const Request& request) const {
    return Call(*optimizers_, method, token_, request);
  }

  absl::StatusOr<v1::ServerInfo> GetServerInfo() const;
  // Waits while other trainers of the user are given their pages.
  absl::StatusOr<v1::Optimizer> GetOptimizer(const std::string& name, v1::OptimizerView view) const;

 private:
  explicit Session(std::shared_ptr<grpc::Channel> channel);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::ServerService::Stub> server_;
  const std::unique_ptr<v1::OptimizerService::Stub> optimizers_;
  superoffload_connection* connection_ = nullptr;
  std::string token_;
};

// The AttachOptimizer stream: the attachment lives as long as this does.
class AttachmentStream {
 public:
  // Opens it; `response` has the whole optimizer.
  static absl::StatusOr<std::unique_ptr<AttachmentStream>> Open(std::shared_ptr<Session> session,
                                                                const v1::AttachOptimizerRequest& request,
                                                                v1::AttachOptimizerResponse* response);
  ~AttachmentStream();

  Session& session() const { return *session_; }

 private:
  explicit AttachmentStream(std::shared_ptr<Session> session)
      : session_(std::move(session)), context_(session_->token()) {}

  const std::shared_ptr<Session> session_;
  CallContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::AttachOptimizerRequest, v1::AttachOptimizerResponse>> messages_;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_SRC_CPP_SESSION_H_
