// How the C++ client makes calls, and their statuses as absl::Status: gRPC, superoffload.h and absl number the
// canonical codes alike.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CPP_CALLS_H_
#define SUPEROFFLOAD_CLIENT_SRC_CPP_CALLS_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "superoffload/superoffload.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload {

// A call of OptimizerService carries the connection's token.
struct CallContext : grpc::ClientContext {
  explicit CallContext(const std::string& token) {
    if (!token.empty()) AddMetadata(SUPEROFFLOAD_TOKEN_METADATA_KEY, token);  // remote operators have none
  }
};

inline absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

// One unary call of `stub`, e.g. Call(stub, &Stub::GetOptimizer, token, request).
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Call(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const std::string& token, const Request& request) {
  CallContext context(token);
  Response response;
  if (grpc::Status status = (stub.*method)(&context, request, &response); !status.ok()) return FromGrpc(status);
  return response;
}

// A request that holds nothing but the name of an optimizer.
template <typename Request>
Request Named(const std::string& name) {
  Request request;
  request.set_name(name);
  return request;
}

// For a wait of superoffload.h.
inline int64_t Milliseconds(absl::Duration timeout) {
  return timeout == absl::InfiniteDuration() ? -1
                                             : absl::ToInt64Milliseconds(absl::Ceil(timeout, absl::Milliseconds(1)));
}

// `code` was returned by the last call of superoffload.h in this thread.
inline absl::Status FromC(int code) {
  return {static_cast<absl::StatusCode>(code), code == 0 ? "" : superoffload_last_error()};
}

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_SRC_CPP_CALLS_H_
