// Stands between the clients' connections and the gRPC servers. Every byte passes as it is; what is looked at are the
// headers of HTTP/2's frames (http2_frames.h), so that no user has more calls opened than it may (call_allowance.h):
//
//     client <---- its socket ----> ConnectionRelay <---- a socket pair ----> gRPC
//
// A connection whose next frame has to wait is not read meanwhile. One that breaks the rules ends.
//
// One thread serves all connections; it waits for none of them. What is on its way is at most two buffers each.
#ifndef SUPEROFFLOAD_SERVER_HOST_CONNECTION_RELAY_H_
#define SUPEROFFLOAD_SERVER_HOST_CONNECTION_RELAY_H_

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/host/call_allowance.h"
#include "server/host/http2_frames.h"
#include "server/memory/shared_memory.h"
#include "server/transport/access_policy.h"

namespace superoffload::host {

class ConnectionRelay {
 public:
  using Clock = std::function<absl::Time()>;

  // UNAVAILABLE: the kernel gives no descriptors or threads.
  static absl::StatusOr<std::unique_ptr<ConnectionRelay>> Start(const transport::ConnectionLimits& connections,
                                                                const CallLimits& calls = {}, Clock now = absl::Now);

  // Ends every connection.
  ~ConnectionRelay();

  // Relays a user's connection until either side ends it; returns the side for the server. RESOURCE_EXHAUSTED: the user
  // has too many, or everybody has. Any thread.
  absl::StatusOr<memory::FileDescriptor> Add(memory::FileDescriptor client, uid_t uid);

 private:
  static constexpr size_t kBufferBytes = 16 << 10;

  // One direction: what was read and is not written yet, of which `passed` bytes may be.
  struct Flow {
    explicit Flow(bool of_client) : frames(of_client) {}

    size_t room() const { return buffer.size() - filled; }

    Http2Frames frames;
    std::array<uint8_t, kBufferBytes> buffer;
    size_t filled = 0;
    size_t passed = 0;
    bool ended = false;  // whoever writes it has closed its side
  };

  struct Connection {
    Connection(uint64_t of, memory::FileDescriptor client_side, memory::FileDescriptor server_side,
               CallAllowance* of_user)
        : number(of), client(std::move(client_side)), server(std::move(server_side)), user(of_user) {}

    const uint64_t number;  // epoll's; never used again
    const memory::FileDescriptor client;
    const memory::FileDescriptor server;
    CallAllowance* const user;
    Flow up{/*of_client=*/true};
    Flow down{/*of_client=*/false};
    absl::flat_hash_set<uint32_t> open;  // calls
    uint32_t last_call = 0;
    size_t header_bytes = 0;  // of headers that are not whole yet
    absl::Time waits_until = absl::InfinitePast();
    uint32_t client_events = 0;  // what epoll watches
    uint32_t server_events = 0;
  };

  ConnectionRelay(const transport::ConnectionLimits& connections, const CallLimits& calls, Clock now,
                  memory::FileDescriptor epoll, memory::FileDescriptor wake);
  void Run();
  void ServeWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Moves what can be moved, and ends the connection when it is over.
  void Serve(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // False: the connection is over.
  bool MoveUp(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MoveDown(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Http2Frames::Answer MayPass(Connection& connection, const Http2Frame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Http2Frames::Answer MayOpen(Connection& connection, const Http2Frame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Http2Frames::Answer MayGoOn(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static bool Flush(int fd, Flow& flow);  // false: nobody reads it any more
  static void CloseCall(Connection& connection, uint32_t call);
  void Watch(Connection& connection, int fd, uint32_t wanted, uint32_t* watched) const;
  void End(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const transport::ConnectionLimits connection_limits_;
  const CallLimits call_limits_;
  const Clock now_;
  const memory::FileDescriptor epoll_;
  const memory::FileDescriptor wake_;  // an eventfd
  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;  // some connection may have to
  std::map<uid_t, CallAllowance> users_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mu_);  // by number
  uint64_t last_number_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread thread_;
};

}  // namespace superoffload::host

#endif  // SUPEROFFLOAD_SERVER_HOST_CONNECTION_RELAY_H_
