// Unix sockets that daemons listen on: made so that their path is never missing, and accepted from so that a lack of
// descriptors neither spins a thread nor fills the backlog.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_UNIX_LISTENER_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_UNIX_LISTENER_H_

#include <sys/socket.h>

#include <string>

#include "absl/status/statusor.h"
#include "server/memory/shared_memory.h"

namespace superoffload::transport {

// Listens on `name` in the directory that `directory` is a descriptor of; `path` is how peers find it. The socket is
// bound under another name and renamed over whatever has this one, so a peer sees the old socket or the new one. Anyone
// may connect: who sees what is decided by the peer's credentials. INVALID_ARGUMENT: the path is too long for peers.
absl::StatusOr<memory::FileDescriptor> ListenOn(int directory, const std::string& name, const std::string& path,
                                                int type);

// Accepts connections, each with the credentials of its peer. Keeps one descriptor in reserve: when the process has no
// other left, the waiting connection is taken with it and closed.
class Acceptor {
 public:
  explicit Acceptor(memory::FileDescriptor listener);

  // The next connection, close-on-exec and non-blocking; invalid when there is none, or no descriptor for it.
  memory::FileDescriptor Accept(ucred* peer);

  int listener() const { return listener_.get(); }

 private:
  memory::FileDescriptor listener_, reserve_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_UNIX_LISTENER_H_
