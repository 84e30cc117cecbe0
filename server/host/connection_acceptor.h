// Passes the connections of the control socket to the gRPC servers. gRPC neither takes over a socket that somebody else
// listens on nor tells a call by whom its connection was made; this does both. What passes through a connection, and
// how many there may be, is the relay's (connection_relay.h).
//
// gRPC identifies the peers of a unix socket by nothing, but a call by the listener through which it came. So there is
// one listener per user, up to kListeners of them; the last one is that of all further users, whose calls only
// their tokens identify. Users who may not use the daemon go to another
// server, with other limits.
#ifndef SUPEROFFLOAD_SERVER_HOST_CONNECTION_ACCEPTOR_H_
#define SUPEROFFLOAD_SERVER_HOST_CONNECTION_ACCEPTOR_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/host/connection_relay.h"
#include "server/memory/shared_memory.h"
#include "server/transport/unix_listener.h"

namespace superoffload::host {

class ConnectionAcceptor {
 public:
  static constexpr size_t kListeners = 32;

  // Whether a call may go on, before its message is received. `uid` is that of the connection, where it is known.
  using Gate =
      std::function<absl::Status(std::optional<uid_t> uid, const std::string& method, const std::string& token)>;

  // Whether a user may use the daemon. Called by the acceptor's thread.
  using Allows = std::function<bool(uid_t uid)>;

  // Before the servers are built; `gate` is called by their threads and must not block.
  ConnectionAcceptor(memory::FileDescriptor listener, std::unique_ptr<ConnectionRelay> relay, Gate gate, Allows allows,
                     std::vector<grpc::ServerBuilder>& builders, grpc::ServerBuilder& strangers_builder);
  ~ConnectionAcceptor();

  // Once the servers run.
  void Start();

 private:
  class ListenerGate;
  struct Listener {
    std::atomic<int64_t>* uid;  // of its gate; -1: not taken
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  };

  void Run();
  void Accept();
  Listener& ListenerOf(uid_t uid);
  Listener MakeListener(grpc::ServerBuilder& builder);

  transport::Acceptor acceptor_;
  const memory::FileDescriptor stop_event_;
  const std::unique_ptr<ConnectionRelay> relay_;
  const Gate gate_;
  const Allows allows_;
  std::vector<Listener> listeners_;
  Listener strangers_;  // of no certain user
  std::thread thread_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_CONNECTION_ACCEPTOR_H_
