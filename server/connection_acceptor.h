// Hands the connections of the control socket to the gRPC server. gRPC neither takes over a socket that somebody else
// listens on nor tells a call by whom its connection was made; this does both, and limits the connections of each user.
//
// gRPC identifies the peers of a unix socket by nothing, but a call by the listener through which it came. So there is
// one listener ("lane") per user, up to kLanes of them; the last lane is that of all further users, whose calls only
// their tokens identify.
#ifndef SUPEROFFLOAD_SERVER_CONNECTION_ACCEPTOR_H_
#define SUPEROFFLOAD_SERVER_CONNECTION_ACCEPTOR_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "server/memory/shared_memory.h"
#include "server/transport/access_policy.h"
#include "server/transport/unix_listener.h"

namespace superoffload {

class ConnectionAcceptor {
 public:
  // Whether a call may go on, before its message is received. `uid` is that of the connection, where it is known.
  using Gate = std::function<absl::Status(std::optional<uid_t> uid, const std::string& method,
                                          const std::string& token)>;

  // Before the server is built; `gate` is called by its threads and must not block.
  ConnectionAcceptor(memory::FileDescriptor listener, const transport::ConnectionLimits& limits, Gate gate,
                     grpc::ServerBuilder& builder);
  ~ConnectionAcceptor();

  // Once the server runs.
  void Start();

 private:
  static constexpr size_t kLanes = 32;

  class LaneGate;
  struct Lane {
    std::atomic<int64_t>* uid;  // of its gate; -1: not taken
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  };

  // A connection that was handed over. The server closes it whenever it likes: the number may be another file's by now.
  struct Handed {
    int fd;
    ino_t inode;
  };

  void Run();
  void Accept();
  bool MayConnect(uid_t uid);
  Lane& LaneOf(uid_t uid);

  transport::Acceptor acceptor_;
  const memory::FileDescriptor stop_event_;
  const transport::ConnectionLimits limits_;
  const Gate gate_;
  std::vector<Lane> lanes_;
  // The thread's own.
  std::map<uid_t, std::vector<Handed>> handed_;
  std::thread thread_;
};

}  // namespace superoffload

#endif  // SUPEROFFLOAD_SERVER_CONNECTION_ACCEPTOR_H_
