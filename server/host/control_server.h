// The gRPC servers of the daemon: the control socket's calls and, where it is configured, remote operators' over TCP.
//
// gRPC limits messages, memory and threads by server, and takes what it needs from whatever connection it likes. So
// there are several, over which the users are spread: one who sends as much as gRPC takes disturbs none of another
// server. What a server holds of messages that are not whole yet, and of calls, has a limit; what the calls keep is
// charged to the memory budget (server/rpc/paged_request.h) or counted (server/rpc/bounded_calls.h).
#ifndef SUPEROFFLOAD_SERVER_HOST_CONTROL_SERVER_H_
#define SUPEROFFLOAD_SERVER_HOST_CONTROL_SERVER_H_

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "server/host/connection_acceptor.h"
#include "server/memory/shared_memory.h"
#include "server/rpc/services.h"
#include "server/transport/descriptor_server.h"
#include "superoffload/v1/config.pb.h"
#include "superoffload/v1/optimizer.pb.h"

namespace superoffload::host {

class ControlServer {
 public:
  // What the calls are answered from; all must outlive the server.
  struct Sources {
    optimizer::OptimizerTable* table;
    checkpoint::Scheduler* scheduler;
    optimizer::StepReportHub* hub;
    optimizer::OptimizerObserver* observer;
    const transport::DescriptorServer* descriptors;
    std::function<v1::ServerInfo()> info;  // called for every request
    absl::StatusOr<v1::Topology> topology;
  };

  // Serves from when it returns, on a listening socket. UNAVAILABLE, NOT_FOUND: what `config` says of remote operators
  // cannot be served.
  static absl::StatusOr<std::unique_ptr<ControlServer>> Serve(const v1::DaemonConfig& config,
                                                              memory::FileDescriptor listener, Sources sources);

  void SetCallsPerSecond(uint32_t calls_per_second) { optimizer_service_.SetCallsPerSecond(calls_per_second); }

  // The health service says so, and checkpoints that calls wait for are cancelled.
  void BeginShutdown();

  // Ends every call and connection and waits for it.
  void Shutdown();

 private:
  ControlServer(uint32_t calls_per_second, Sources sources);
  absl::Status Start(const v1::DaemonConfig& config, memory::FileDescriptor listener);
  absl::Status StartServer(grpc::ServerBuilder& builder);  // of users, or of remote operators
  absl::Status ServeRemote(const v1::DaemonConfig& config);

  const transport::DescriptorServer* const descriptors_;
  rpc::ServerServiceImpl server_service_;
  rpc::OptimizerServiceImpl optimizer_service_;
  // Those of users; that for users who may not use the daemon, with health, reflection and what the daemon is; that of
  // remote operators.
  std::vector<std::unique_ptr<grpc::Server>> servers_;
  std::unique_ptr<ConnectionAcceptor> acceptor_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_CONTROL_SERVER_H_
