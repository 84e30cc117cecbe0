#include "server/transport/descriptor_server.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "server/memory/thread.h"
#include "superoffload/v1/printable.h"

namespace superoffload::transport {
namespace {

constexpr size_t kMaxMappings = 64;  // under way at once

absl::StatusOr<std::string> RandomToken() {
  char bytes[SUPEROFFLOAD_TOKEN_CHARACTERS / 2];
  if (::getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes))) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

superoffload_socket_reply Reply(superoffload_socket_kind kind) {
  superoffload_socket_reply reply{};
  reply.magic = SUPEROFFLOAD_SOCKET_MAGIC;
  reply.version = SUPEROFFLOAD_WIRE_VERSION;
  reply.kind = static_cast<uint16_t>(kind);
  return reply;
}

superoffload_socket_reply ErrorReply(const absl::Status& status) {
  superoffload_socket_reply reply = Reply(SUPEROFFLOAD_SOCKET_ERROR);
  reply.code = static_cast<uint32_t>(status.code());
  const std::string message = Printable(std::string(status.message()));
  std::memcpy(reply.message, message.data(), std::min(message.size(), sizeof(reply.message) - 1));
  return reply;
}

// Never waits: a peer that does not read its replies is dropped.
bool Send(int fd, const superoffload_socket_reply& reply, std::span<const memory::FileDescriptor> descriptors = {}) {
  iovec iov{const_cast<superoffload_socket_reply*>(&reply), sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * SUPEROFFLOAD_DESCRIPTOR_COUNT)] = {};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    SUPEROFFLOAD_CHECK_LE(descriptors.size(), SUPEROFFLOAD_DESCRIPTOR_COUNT);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
    int* fds = reinterpret_cast<int*>(CMSG_DATA(header));
    for (const memory::FileDescriptor& descriptor : descriptors) *fds++ = descriptor.get();
  }
  return ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(reply));
}

// A client reads each reply before it asks again. The kernel counts the descriptors in replies that nobody has read,
// for all of a user's processes together, and lets the daemon send no others at some number.
bool HasUnreadReply(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

// The size of a request, however large it was, and the descriptors that came with it; the kernel drops further ones.
ssize_t Receive(int fd, superoffload_device_request* request, std::vector<memory::FileDescriptor>* descriptors) {
  iovec iov{request, sizeof(*request)};
  constexpr size_t kBytes = SUPEROFFLOAD_MAX_DEVICE_PIECES * sizeof(int);
  static_assert(CMSG_SPACE(kBytes) == CMSG_LEN(kBytes), "padding would hold another one");
  alignas(cmsghdr) char control[CMSG_SPACE(kBytes)];
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t received = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC);
  if (received < 0) return received;
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int taken;
      std::memcpy(&taken, CMSG_DATA(header) + i * sizeof(int), sizeof(taken));
      descriptors->emplace_back(taken);
    }
  }
  return received;
}

// The time it takes tells nothing about where two tokens differ.
bool EqualInConstantTime(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Serve(
    memory::FileDescriptor listener, const std::string& path, AccessPolicy access, const ConnectionLimits& limits,
    DescriptorSource source, LentSource lent, DeviceMapper map_device, SessionEnd on_session_end) {
  memory::FileDescriptor wake_event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_event.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  return std::unique_ptr<DescriptorServer>(
      new DescriptorServer(std::move(listener), path, std::move(access), limits, std::move(wake_event),
                           std::move(source), std::move(lent), std::move(map_device), std::move(on_session_end)));
}

DescriptorServer::DescriptorServer(memory::FileDescriptor listener, std::string path, AccessPolicy access,
                                   const ConnectionLimits& limits, memory::FileDescriptor wake_event,
                                   DescriptorSource source, LentSource lent, DeviceMapper map_device,
                                   SessionEnd on_session_end)
    : path_(std::move(path)),
      limits_(limits),
      acceptor_(std::move(listener)),
      wake_event_(std::move(wake_event)),
      source_(std::move(source)),
      lent_(std::move(lent)),
      map_device_(std::move(map_device)),
      on_session_end_(std::move(on_session_end)),
      access_(std::move(access)),
      thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "so-descriptors");
}

DescriptorServer::~DescriptorServer() {
  stopping_ = true;
  Wake();
  thread_.join();
  for (Mapping& mapping : mappings_) mapping.thread.join();
}

void DescriptorServer::Wake() const {
  const uint64_t one = 1;
  (void)!::write(wake_event_.get(), &one, sizeof(one));
}

absl::StatusOr<Peer> DescriptorServer::Authenticate(const std::string& token) const {
  absl::MutexLock lock(&mu_);
  const Peer* found = nullptr;
  for (const auto& [known, peer] : peers_) {
    if (EqualInConstantTime(known, token)) found = &peer;
  }
  if (found != nullptr) return *found;
  return absl::UnauthenticatedError(absl::StrCat("no valid token in the metadata \"" SUPEROFFLOAD_TOKEN_METADATA_KEY
                                                 "\"; say HELLO on the descriptor socket ",
                                                 path_, " and keep that connection open"));
}

void DescriptorServer::SetAccess(AccessPolicy access) {
  {
    absl::MutexLock lock(&mu_);
    access_ = std::move(access);
    access_changed_ = true;
    for (auto it = peers_.begin(); it != peers_.end();) {
      it->second.is_operator = access_.IsOperator(it->second.uid);
      if (access_.Allows(it->second.uid)) {
        ++it;
      } else {
        peers_.erase(it++);  // its token is void at once; the thread ends the rest
      }
    }
  }
  Wake();
}

void DescriptorServer::ApplyAccess() {
  AccessPolicy access;
  {
    absl::MutexLock lock(&mu_);
    if (!std::exchange(access_changed_, false)) return;
    access = access_;
  }
  std::vector<int> revoked;
  for (auto& [fd, connection] : connections_) {
    connection.peer.is_operator = access.IsOperator(connection.peer.uid);
    if (connection.refusal.ok() && !access.Allows(connection.peer.uid)) revoked.push_back(fd);
  }
  for (const int fd : revoked) Drop(fd);
}

AccessPolicy DescriptorServer::access() const {
  absl::MutexLock lock(&mu_);
  return access_;
}

void DescriptorServer::Run() {
  std::vector<pollfd> polled;
  while (!stopping_) {
    polled.clear();
    polled.push_back({wake_event_.get(), POLLIN, 0});
    polled.push_back({acceptor_.listener(), POLLIN, 0});
    for (const auto& [fd, connection] : connections_) {
      polled.push_back({fd, POLLIN, 0});
      polled.push_back({connection.process.get(), POLLIN, 0});  // ignored when it is -1
    }
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    if (uint64_t ignored; polled[0].revents != 0) (void)!::read(wake_event_.get(), &ignored, sizeof(ignored));
    ApplyAccess();
    for (size_t i = 2; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      if (const auto it = connections_.find(polled[i].fd); it != connections_.end()) {
        if (!Answer(it->second)) Drop(polled[i].fd);
      } else if (connections_.contains(polled[i - 1].fd)) {
        Drop(polled[i - 1].fd);  // the process that belongs to the connection before it has died
      }
    }
    if (polled[1].revents != 0) Accept();  // last: the numbers above are of the connections that were polled
  }
  while (!connections_.empty()) Drop(connections_.begin()->first);
}

void DescriptorServer::Accept() {
  ucred credentials{};
  memory::FileDescriptor fd = acceptor_.Accept(&credentials);
  if (!fd.valid()) return;
  absl::StatusOr<std::string> token = RandomToken();
  if (!token.ok()) return;
  const Peer peer{.session = ++last_session_,
                  .uid = credentials.uid,
                  .pid = credentials.pid,
                  .is_operator = access().IsOperator(credentials.uid)};
  absl::Status refusal = Admit(credentials.uid);
  if (refusal.ok()) {
    absl::MutexLock lock(&mu_);
    peers_[*token] = peer;
  } else {
    DropOldestRefused();
  }
  const int key = fd.get();
  memory::FileDescriptor process(refusal.ok() ? static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)) : -1);
  const bool fresh =
      connections_
          .emplace(key, Connection{std::move(fd), std::move(process), peer, *std::move(token), std::move(refusal)})
          .second;
  SUPEROFFLOAD_CHECK(fresh, "descriptor ", key, " of a new connection is that of an open one");
}

absl::Status DescriptorServer::Admit(uid_t uid) const {
  if (!access().Allows(uid)) {
    return absl::PermissionDeniedError(
        absl::StrCat("uid ", uid, " may not use this daemon; ask its operator to add it to allowed_uids"));
  }
  size_t own = 0;
  size_t all = 0;
  for (const auto& [fd, connection] : connections_) {
    if (!connection.refusal.ok()) continue;
    ++all;
    if (connection.peer.uid == uid) ++own;
  }
  if (!limits_.Admits(uid, own, all)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("uid ", uid, " has ", own, " connections (at most ", limits_.per_user, ") and all users have ",
                     all, " (at most ", limits_.total,
                     "); close some, or try again later. One is enough for all optimizers of a process"));
  }
  return absl::OkStatus();
}

// Those that wait for an answer and ask nothing must not fill the house.
void DescriptorServer::DropOldestRefused() {
  size_t refused = 0;
  const Connection* oldest = nullptr;
  for (const auto& [fd, connection] : connections_) {
    if (connection.refusal.ok()) continue;
    ++refused;
    if (oldest == nullptr || connection.peer.session < oldest->peer.session) oldest = &connection;
  }
  if (refused < limits_.per_user) return;
  SUPEROFFLOAD_CHECK(oldest != nullptr, limits_.per_user, " connections per user");
  Drop(oldest->fd.get());
}

bool DescriptorServer::Answer(const Connection& connection) {
  superoffload_device_request device_request{};  // the largest one
  std::vector<memory::FileDescriptor> descriptors;
  const ssize_t received = Receive(connection.fd.get(), &device_request, &descriptors);
  if (received < 0) return errno == EAGAIN || errno == EINTR;
  if (received == 0) return false;
  if (HasUnreadReply(connection.fd.get())) return false;
  const superoffload_socket_request& request = device_request.header;
  const size_t expected = request.kind == SUPEROFFLOAD_SOCKET_DEVICE_MEMORY ? sizeof(device_request) : sizeof(request);
  if (received != static_cast<ssize_t>(expected) || request.magic != SUPEROFFLOAD_SOCKET_MAGIC) {
    Send(connection.fd.get(),
         ErrorReply(absl::InvalidArgumentError(
             absl::StrCat("not a request of the descriptor socket (", received, " bytes); use the client library"))));
    return false;
  }
  if (request.version != SUPEROFFLOAD_WIRE_VERSION) {
    Send(connection.fd.get(), ErrorReply(absl::FailedPreconditionError(absl::StrCat(
                                  "the client speaks version ", request.version, " of the wire, this daemon version ",
                                  SUPEROFFLOAD_WIRE_VERSION, "; install the same release of both"))));
    return false;
  }
  if (!connection.refusal.ok()) {
    Send(connection.fd.get(), ErrorReply(connection.refusal));
    return false;
  }
  switch (request.kind) {
    case SUPEROFFLOAD_SOCKET_HELLO: {
      superoffload_socket_reply reply = Reply(SUPEROFFLOAD_SOCKET_WELCOME);
      std::memcpy(reply.token, connection.token.data(), SUPEROFFLOAD_TOKEN_CHARACTERS);
      return Send(connection.fd.get(), reply);
    }
    case SUPEROFFLOAD_SOCKET_DESCRIPTORS: {
      absl::StatusOr<AttachmentDescriptors> answer = source_(connection.peer, request.attachment_epoch);
      if (!answer.ok()) return Send(connection.fd.get(), ErrorReply(answer.status()));
      superoffload_socket_reply reply = Reply(SUPEROFFLOAD_SOCKET_DESCRIPTORS);
      reply.descriptors = SUPEROFFLOAD_DESCRIPTOR_COUNT;
      std::copy(answer->bytes.begin(), answer->bytes.end(), reply.bytes);
      return Send(connection.fd.get(), reply, answer->fds);
    }
    case SUPEROFFLOAD_SOCKET_LENT_MEMORY: {
      absl::StatusOr<LentMemory> lent = lent_(connection.peer, request.attachment_epoch, request.lent_number);
      if (!lent.ok()) return Send(connection.fd.get(), ErrorReply(lent.status()));
      superoffload_socket_reply reply = Reply(SUPEROFFLOAD_SOCKET_LENT_MEMORY);
      reply.descriptors = 1;
      reply.bytes[0] = lent->bytes;
      return Send(connection.fd.get(), reply, {&lent->fd, 1});
    }
    case SUPEROFFLOAD_SOCKET_DEVICE_MEMORY:
      return ServeDevice(connection, device_request, std::move(descriptors));
    default:
      return Send(connection.fd.get(),
                  ErrorReply(absl::UnimplementedError(absl::StrCat("unknown request kind ", request.kind))));
  }
}

bool DescriptorServer::ServeDevice(const Connection& connection, const superoffload_device_request& request,
                                   std::vector<memory::FileDescriptor> descriptors) {
  std::erase_if(mappings_, [](Mapping& mapping) {
    if (!mapping.done) return false;
    mapping.thread.join();
    return true;
  });
  memory::FileDescriptor answer(::fcntl(connection.fd.get(), F_DUPFD_CLOEXEC, 0));  // the connection may end meanwhile
  if (mappings_.size() >= kMaxMappings || !answer.valid()) {
    return Send(connection.fd.get(), ErrorReply(absl::ResourceExhaustedError(absl::StrCat(
                                         mappings_.size(), " trainers' GPU memory is being mapped; try again later"))));
  }
  Mapping& mapping = mappings_.emplace_back();
  SUPEROFFLOAD_CHECK_LE(mappings_.size(), kMaxMappings);
  mapping.answer = std::move(answer);
  mapping.descriptors = std::move(descriptors);
  absl::StatusOr<std::thread> thread =
      memory::StartThread("so-map-device", [this, &mapping, request, peer = connection.peer] {
        std::vector<int> numbers;
        for (const memory::FileDescriptor& descriptor : mapping.descriptors) numbers.push_back(descriptor.get());
        const absl::Status status = map_device_(peer, request, numbers);
        Send(mapping.answer.get(), status.ok() ? Reply(SUPEROFFLOAD_SOCKET_DEVICE_MEMORY) : ErrorReply(status));
        mapping.answer = memory::FileDescriptor();
        mapping.descriptors.clear();
        mapping.done = true;
      });
  if (!thread.ok()) {
    mappings_.pop_back();
    return Send(connection.fd.get(), ErrorReply(thread.status()));
  }
  mapping.thread = *std::move(thread);
  return true;
}

void DescriptorServer::Drop(int fd) {
  const auto it = connections_.find(fd);
  SUPEROFFLOAD_CHECK(it != connections_.end(), "connection ", fd);
  const Peer peer = it->second.peer;
  {
    absl::MutexLock lock(&mu_);
    peers_.erase(it->second.token);
  }
  connections_.erase(it);
  on_session_end_(peer);
}

}  // namespace superoffload::transport
