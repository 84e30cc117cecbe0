// The keeper's end of its socket (proto/superoffload/v1/keeper_socket.h).
#ifndef SUPEROFFLOAD_SERVER_HOST_KEEPER_SOCKET_H_
#define SUPEROFFLOAD_SERVER_HOST_KEEPER_SOCKET_H_

#include <optional>
#include <string>

#include "server/host/kept_descriptors.h"
#include "server/memory/shared_memory.h"
#include "server/transport/unix_listener.h"

namespace superoffload::host {

// Not thread-safe.
class KeeperSocket {
 public:
  // Answers on `listener` from now on, in the place of the one before.
  void Listen(memory::FileDescriptor listener) { acceptor_.emplace(std::move(listener)); }

  // For poll; -1 before there is one.
  int listener() const { return acceptor_ ? acceptor_->listener() : -1; }

  // Answers one connection. While a daemon runs nothing is dropped behind its back. Waits a second at most.
  void Serve(KeptDescriptors& kept, bool daemon_runs);

 private:
  static std::string Answer(const std::string& request, KeptDescriptors& kept, bool daemon_runs);

  std::optional<transport::Acceptor> acceptor_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_KEEPER_SOCKET_H_
