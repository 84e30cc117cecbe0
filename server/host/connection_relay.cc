#include "server/host/connection_relay.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "server/memory/thread.h"

namespace superoffload::host {
namespace {

using memory::FileDescriptor;
using Answer = Http2Frames::Answer;

constexpr absl::Duration kPause = absl::Milliseconds(10);  // of a connection whose user has to wait
constexpr uint64_t kWake = 0;                              // no connection's number
constexpr uint32_t kMessageBytes = 1024;                   // data from so many bytes on is no mere frame

// Reads what there is room for. False: nothing will come any more.
bool Receive(int fd, std::span<uint8_t> room, size_t* received) {
  const ssize_t count = ::recv(fd, room.data(), room.size(), MSG_DONTWAIT);
  *received = count > 0 ? static_cast<size_t>(count) : 0;
  return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

// False: nobody reads any more.
bool Send(int fd, std::span<const uint8_t> bytes, size_t* sent) {
  const ssize_t count = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  *sent = count > 0 ? static_cast<size_t>(count) : 0;
  return count >= 0 || errno == EAGAIN || errno == EINTR;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ConnectionRelay>> ConnectionRelay::Start(const transport::ConnectionLimits& connections,
                                                                        const CallLimits& calls, Clock now) {
  FileDescriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  FileDescriptor wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWake}};
  if (!epoll.valid() || !wake.valid() || ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot relay connections: ", std::strerror(errno)));
  }
  std::unique_ptr<ConnectionRelay> relay(
      new ConnectionRelay(connections, calls, std::move(now), std::move(epoll), std::move(wake)));
  absl::StatusOr<std::thread> thread = memory::StartThread("so-relay", [relay = relay.get()] { relay->Run(); });
  if (!thread.ok()) return thread.status();
  relay->thread_ = *std::move(thread);
  return relay;
}

ConnectionRelay::ConnectionRelay(const transport::ConnectionLimits& connections, const CallLimits& calls, Clock now,
                                 FileDescriptor epoll, FileDescriptor wake)
    : connection_limits_(connections),
      call_limits_(calls),
      now_(std::move(now)),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)) {}

ConnectionRelay::~ConnectionRelay() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<FileDescriptor> ConnectionRelay::Add(FileDescriptor client, uid_t uid) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  FileDescriptor mine(pair[0]);
  FileDescriptor servers(pair[1]);
  absl::MutexLock lock(&mu_);
  const absl::Time now = now_();
  for (auto it = users_.begin(); it != users_.end();) {
    CallAllowance& idle = it->second;
    it = idle.connections == 0 && idle.calls.IsFull(now) && idle.frames.IsFull(now) ? users_.erase(it) : std::next(it);
  }
  CallAllowance& user = users_.try_emplace(uid, call_limits_).first->second;
  if (!connection_limits_.Admits(uid, user.connections, connections_.size())) {
    return absl::ResourceExhaustedError(
        absl::StrCat("uid ", uid, " has ", user.connections, " connections, and all users have ", connections_.size()));
  }
  ++user.connections;
  const uint64_t number = ++last_number_;
  auto connection = std::make_unique<Connection>(number, std::move(client), std::move(mine), &user);
  Watch(*connection, connection->client.get(), EPOLLIN, &connection->client_events);
  Watch(*connection, connection->server.get(), EPOLLIN, &connection->server_events);
  connections_.emplace(number, std::move(connection));
  return servers;
}

void ConnectionRelay::Run() {
  std::array<epoll_event, 64> events;
  int timeout = -1;
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout);
    absl::MutexLock lock(&mu_);
    if (stopping_) return;
    for (int i = 0; i < count; ++i) {
      const uint64_t number = events[i].data.u64;    // a copy: the kernel's struct is packed
      const auto found = connections_.find(number);  // one of the events before may have ended it
      if (found != connections_.end()) Serve(*found->second);
    }
    if (waiting_) ServeWaiting();
    timeout = waiting_ ? static_cast<int>(absl::ToInt64Milliseconds(kPause)) : -1;
  }
}

void ConnectionRelay::ServeWaiting() {
  const absl::Time now = now_();
  std::vector<Connection*> over;
  waiting_ = false;
  for (const auto& [number, connection] : connections_) {
    if (connection->waits_until == absl::InfinitePast()) continue;
    if (connection->waits_until <= now) over.push_back(connection.get());
    waiting_ = true;
  }
  for (Connection* const connection : over) Serve(*connection);
}

void ConnectionRelay::Serve(Connection& connection) {
  if (!MoveUp(connection) || !MoveDown(connection)) return End(connection);
  const bool reads_client = connection.waits_until == absl::InfinitePast() && connection.up.room() > 0;
  const bool reads_server = connection.down.room() > 0;
  Watch(connection, connection.client.get(),
        (reads_client ? EPOLLIN : 0u) | (connection.down.passed > 0 ? EPOLLOUT : 0u), &connection.client_events);
  Watch(connection, connection.server.get(), (reads_server ? EPOLLIN : 0u) | (connection.up.passed > 0 ? EPOLLOUT : 0u),
        &connection.server_events);
}

bool ConnectionRelay::MoveUp(Connection& connection) {
  Flow& up = connection.up;
  size_t received = 0;
  if (connection.waits_until > now_()) return up.passed == 0 || Flush(connection.server.get(), up);
  // A client that is gone waits for nothing that is still on its way up.
  if (!Receive(connection.client.get(), std::span(up.buffer).subspan(up.filled), &received) && up.room() > 0) {
    return false;
  }
  up.filled += received;
  const auto may_pass = [&](const Http2Frame& frame) {
    mu_.AssertHeld();
    return MayPass(connection, frame);
  };
  const Http2Frames::Progress progress =
      up.frames.Read(std::span(up.buffer).subspan(up.passed, up.filled - up.passed), may_pass);
  if (progress.answer == Answer::kBroken) return false;
  connection.waits_until = progress.answer == Answer::kWait ? now_() + kPause : absl::InfinitePast();
  waiting_ = waiting_ || progress.answer == Answer::kWait;
  up.passed += progress.bytes;
  return up.passed == 0 || Flush(connection.server.get(), up);
}

bool ConnectionRelay::MoveDown(Connection& connection) {
  Flow& down = connection.down;
  size_t received = 0;
  if (!down.ended && down.room() > 0) {
    down.ended = !Receive(connection.server.get(), std::span(down.buffer).subspan(down.filled), &received);
  }
  down.filled += received;
  const auto note = [&](const Http2Frame& frame) {
    mu_.AssertHeld();
    const bool last = (frame.type == Http2Frame::kHeaders || frame.type == Http2Frame::kData) &&
                      (frame.flags & Http2Frame::kEndStream) != 0;
    if (last || frame.type == Http2Frame::kResetStream) CloseCall(connection, frame.stream);
    return Answer::kPass;
  };
  down.passed += down.frames.Read(std::span(down.buffer).subspan(down.passed, down.filled - down.passed), note).bytes;
  if (down.passed > 0 && !Flush(connection.client.get(), down)) return false;
  return !down.ended || down.passed > 0;
}

// Writes what has passed, and moves what is behind it to the front.
bool ConnectionRelay::Flush(int fd, Flow& flow) {
  size_t sent = 0;
  if (!Send(fd, std::span(flow.buffer).first(flow.passed), &sent)) return false;
  std::memmove(flow.buffer.data(), flow.buffer.data() + sent, flow.filled - sent);
  flow.filled -= sent;
  flow.passed -= sent;
  return true;
}

Answer ConnectionRelay::MayPass(Connection& connection, const Http2Frame& frame) {
  switch (frame.type) {
    case Http2Frame::kHeaders:
    case Http2Frame::kContinuation: {
      const size_t bytes = connection.header_bytes + frame.length;
      if (bytes > call_limits_.header_bytes) return Answer::kBroken;
      const bool opens = frame.type == Http2Frame::kHeaders && frame.stream > connection.last_call;
      const Answer answer = opens ? MayOpen(connection, frame) : MayGoOn(connection);
      if (answer == Answer::kPass) connection.header_bytes = (frame.flags & Http2Frame::kEndHeaders) != 0 ? 0 : bytes;
      return answer;
    }
    case Http2Frame::kResetStream: {
      const Answer answer = MayGoOn(connection);
      if (answer == Answer::kPass) CloseCall(connection, frame.stream);
      return answer;
    }
    case Http2Frame::kData:
      return frame.length >= kMessageBytes ? Answer::kPass : MayGoOn(connection);
    default:
      return MayGoOn(connection);
  }
}

Answer ConnectionRelay::MayOpen(Connection& connection, const Http2Frame& frame) {
  if (connection.user->open_calls >= call_limits_.open_calls) return Answer::kBroken;
  if (!connection.user->calls.Take(now_())) return Answer::kWait;
  connection.last_call = frame.stream;
  connection.open.insert(frame.stream);
  ++connection.user->open_calls;
  return Answer::kPass;
}

Answer ConnectionRelay::MayGoOn(Connection& connection) {
  return connection.user->frames.Take(now_()) ? Answer::kPass : Answer::kWait;
}

void ConnectionRelay::CloseCall(Connection& connection, uint32_t call) {
  if (connection.open.erase(call) == 0) return;
  SUPEROFFLOAD_CHECK(connection.user->open_calls > 0, "call ", call);
  --connection.user->open_calls;
}

void ConnectionRelay::Watch(Connection& connection, int fd, uint32_t wanted, uint32_t* watched) const {
  if (wanted == *watched) return;
  epoll_event event{.events = wanted, .data = {.u64 = connection.number}};
  const int operation = *watched == 0 ? EPOLL_CTL_ADD : wanted == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
  // Where nothing is wanted the descriptor is taken out: epoll would tell of its other end's death again and again.
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) == 0) *watched = wanted;
}

void ConnectionRelay::End(Connection& connection) {
  CallAllowance& user = *connection.user;
  SUPEROFFLOAD_CHECK(user.connections > 0 && user.open_calls >= connection.open.size(), "connection ",
                     connection.number);
  --user.connections;
  user.open_calls -= connection.open.size();
  connections_.erase(connection.number);  // closes both descriptors, which leave epoll with that
}

}  // namespace superoffload::host
