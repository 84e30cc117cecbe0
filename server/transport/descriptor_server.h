// The descriptor socket (proto/superoffload/v1/descriptor_socket.h): identifies peers by SO_PEERCRED, gives each
// connection the token that its gRPC calls present, and passes the memfds of attachments.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_DESCRIPTOR_SERVER_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_DESCRIPTOR_SERVER_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/memory/shared_memory.h"
#include "server/transport/access_policy.h"
#include "server/transport/unix_listener.h"
#include "superoffload/v1/descriptor_socket.h"

namespace superoffload::transport {

// Who is at the other end of a connection.
struct Peer {
  uint64_t session = 0;  // names the connection; never reused
  uid_t uid = 0;
  pid_t pid = 0;
  bool is_operator = false;  // sees and touches the optimizers of all users
};

// What DESCRIPTORS answers; the descriptors stay the owner's until the reply is sent.
struct AttachmentDescriptors {
  std::array<memory::FileDescriptor, SUPEROFFLOAD_DESCRIPTOR_COUNT> fds;
  std::array<uint64_t, SUPEROFFLOAD_DESCRIPTOR_COUNT> bytes{};
};

// What LENT_MEMORY answers.
struct LentMemory {
  memory::FileDescriptor fd;
  uint64_t bytes = 0;
};

class DescriptorServer {
 public:
  // Called by the server's thread; must not wait for long.
  using DescriptorSource = std::function<absl::StatusOr<AttachmentDescriptors>(const Peer&, uint64_t attachment_epoch)>;
  using LentSource = std::function<absl::StatusOr<LentMemory>(const Peer&, uint64_t attachment_epoch, uint64_t number)>;
  // Maps the GPU memory of the attachment that the request names. `descriptors` came with it. Called by a thread of
  // its own: it may take minutes.
  using DeviceMapper = std::function<absl::Status(const Peer&, const superoffload_device_request& request,
                                                  std::span<const int> descriptors)>;
  using SessionEnd = std::function<void(const Peer&)>;

  // Serves a listening SOCK_SEQPACKET socket (unix_listener.h), which peers find at `path`.
  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Serve(memory::FileDescriptor listener,
                                                                 const std::string& path, AccessPolicy access,
                                                                 const ConnectionLimits& limits,
                                                                 DescriptorSource source, LentSource lent,
                                                                 DeviceMapper map_device, SessionEnd on_session_end);

  // Closes every connection, calling `on_session_end` for each.
  ~DescriptorServer();

  // UNAUTHENTICATED when no open connection has the token. Thread-safe.
  absl::StatusOr<Peer> Authenticate(const std::string& token) const;

  // Ends the connections of users that are not allowed any more, and with them their tokens and attachments.
  void SetAccess(AccessPolicy access);

  // Whether the user may use the daemon at present. Thread-safe.
  bool Allows(uid_t uid) const { return access().Allows(uid); }

  const std::string& path() const { return path_; }

 private:
  struct Connection {
    memory::FileDescriptor fd;
    // Tells of the peer's death at once, even when its forks (data loaders) keep the socket open. Invalid where the
    // kernel has no pidfds for it.
    memory::FileDescriptor process;
    Peer peer;
    std::string token;
    absl::Status refusal;  // what its first request is answered with, if it may not stay
  };

  // A GPU's memory being mapped.
  struct Mapping {
    memory::FileDescriptor answer;                    // of the connection, which may end meanwhile
    std::vector<memory::FileDescriptor> descriptors;  // that came with the request
    std::atomic<bool> done{false};
    std::thread thread;
  };

  DescriptorServer(memory::FileDescriptor listener, std::string path, AccessPolicy access,
                   const ConnectionLimits& limits, memory::FileDescriptor wake_event, DescriptorSource source,
                   LentSource lent, DeviceMapper map_device, SessionEnd on_session_end);
  void Run();
  void Wake() const;
  void Accept();
  void ApplyAccess();
  // Why the user may have no further connection, if it may not.
  absl::Status Admit(uid_t uid) const;
  AccessPolicy access() const;
  // False when the connection is to be closed.
  bool Answer(const Connection& connection);
  bool ServeDevice(const Connection& connection, const superoffload_device_request& request,
                   std::vector<memory::FileDescriptor> descriptors);
  void Drop(int fd);
  void DropOldestRefused();

  const std::string path_;
  const ConnectionLimits limits_;
  Acceptor acceptor_;
  const memory::FileDescriptor wake_event_;  // written when the thread has more to look at than its sockets
  const DescriptorSource source_;
  const LentSource lent_;
  const DeviceMapper map_device_;
  const SessionEnd on_session_end_;
  std::atomic<bool> stopping_{false};
  uint64_t last_session_ = 0;
  // The thread's own.
  std::map<int, Connection> connections_;
  std::list<Mapping> mappings_;
  mutable absl::Mutex mu_;
  AccessPolicy access_ ABSL_GUARDED_BY(mu_);
  bool access_changed_ ABSL_GUARDED_BY(mu_) = false;
  absl::flat_hash_map<std::string, Peer> peers_ ABSL_GUARDED_BY(mu_);  // by token
  std::thread thread_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_DESCRIPTOR_SERVER_H_
