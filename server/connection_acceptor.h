// Hands connections to a gRPC server from a socket that the service manager listens on: gRPC cannot take it over
// itself.
#ifndef SUPEROFFLOAD_SERVER_CONNECTION_ACCEPTOR_H_
#define SUPEROFFLOAD_SERVER_CONNECTION_ACCEPTOR_H_

#include <grpcpp/server_builder.h>

#include <memory>
#include <thread>

#include "server/memory/shared_memory.h"

namespace superoffload {

class ConnectionAcceptor {
 public:
  // Before the server is built.
  ConnectionAcceptor(memory::FileDescriptor listener, grpc::ServerBuilder& builder);
  ~ConnectionAcceptor();

  // Once the server runs.
  void Start();

 private:
  void Run();

  const memory::FileDescriptor listener_;
  const memory::FileDescriptor stop_event_;
  const std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::thread thread_;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_SERVER_CONNECTION_ACCEPTOR_H_
