#include "client/src/descriptor_connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "client/src/connect_patience.h"
#include "kernels/base/check.h"

namespace superoffload::client {
namespace {

// To register hundreds of gigabytes takes minutes, and an answer that came later would be taken for the next one.
constexpr timeval kShareTimeout{.tv_sec = 1800, .tv_usec = 0};

// A daemon that is alive answers at once; one that is stopped must not hang its trainer for ever.
timeval ReplyTimeout() {
  const std::chrono::milliseconds patience = ConnectPatience();
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(patience);
  return {.tv_sec = whole.count(), .tv_usec = std::chrono::microseconds(patience - whole).count()};
}

superoffload_socket_request Request(superoffload_socket_kind kind, uint64_t attachment_epoch) {
  superoffload_socket_request request{};
  request.magic = SUPEROFFLOAD_SOCKET_MAGIC;
  request.version = SUPEROFFLOAD_WIRE_VERSION;
  request.kind = static_cast<uint16_t>(kind);
  request.attachment_epoch = attachment_epoch;
  return request;
}

bool Send(int socket, const void* request, size_t bytes, std::span<const int> descriptors) {
  iovec iov{const_cast<void*>(request), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(SUPEROFFLOAD_MAX_DEVICE_PIECES * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    SUPEROFFLOAD_CHECK_LE(descriptors.size(), SUPEROFFLOAD_MAX_DEVICE_PIECES);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

// Takes ownership of whatever descriptors came, expected or not.
size_t TakeDescriptors(msghdr& message, std::span<FileDescriptor> files) {
  size_t taken = 0;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i, ++taken) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      FileDescriptor owned(fd);
      if (taken < files.size()) files[taken] = std::move(owned);
    }
  }
  return taken;
}

Status CheckSize(size_t index, const FileDescriptor& fd, size_t bytes) {
  struct stat file{};
  if (::fstat(fd.get(), &file) == 0 && static_cast<uint64_t>(file.st_size) >= bytes) return {};
  return Error(Code::kInternal, "descriptor ", index, " holds fewer than the ", bytes, " bytes that the daemon states");
}

}  // namespace

Status DescriptorConnection::Connect(const std::string& path, std::shared_ptr<DescriptorConnection>* connection) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return Error(Code::kInvalidArgument, "the descriptor socket's path ", path, " is longer than ",
                 sizeof(address.sun_path) - 1, " bytes; start the daemon with a shorter runtime_directory");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) return ErrnoError(Code::kResourceExhausted, "socket");
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoError(Code::kUnavailable, "no superoffloadd answers on " + path + "; start it or check the endpoint");
  }
  std::shared_ptr<DescriptorConnection> created(new DescriptorConnection(std::move(socket)));
  superoffload_socket_request request = Request(SUPEROFFLOAD_SOCKET_HELLO, 0);
  superoffload_socket_reply reply;
  if (Status status = created->Exchange(&request, sizeof(request), {}, SUPEROFFLOAD_SOCKET_WELCOME, &reply);
      !status.ok()) {
    return status;
  }
  created->token_.assign(reply.token, SUPEROFFLOAD_TOKEN_CHARACTERS);
  *connection = std::move(created);
  return {};
}

Status DescriptorConnection::Fetch(uint64_t attachment_epoch, AttachmentFiles* files) {
  superoffload_socket_request request = Request(SUPEROFFLOAD_SOCKET_DESCRIPTORS, attachment_epoch);
  superoffload_socket_reply reply;
  if (Status status = Exchange(&request, sizeof(request), {}, SUPEROFFLOAD_SOCKET_DESCRIPTORS, &reply, files->fds);
      !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < files->fds.size(); ++i) {
    files->bytes[i] = reply.bytes[i];
    if (Status status = CheckSize(i, files->fds[i], reply.bytes[i]); !status.ok()) return status;
  }
  return {};
}

Status DescriptorConnection::FetchLent(uint64_t attachment_epoch, uint64_t number, FileDescriptor* file,
                                       size_t* bytes) {
  superoffload_socket_request request = Request(SUPEROFFLOAD_SOCKET_LENT_MEMORY, attachment_epoch);
  request.lent_number = number;
  superoffload_socket_reply reply;
  if (Status status = Exchange(&request, sizeof(request), {}, SUPEROFFLOAD_SOCKET_LENT_MEMORY, &reply, {file, 1});
      !status.ok()) {
    return status;
  }
  *bytes = reply.bytes[0];
  return CheckSize(0, *file, *bytes);
}

Status DescriptorConnection::ShareDevice(uint64_t attachment_epoch, superoffload_device_request* request,
                                         std::span<const int> descriptors) {
  request->header = Request(SUPEROFFLOAD_SOCKET_DEVICE_MEMORY, attachment_epoch);
  superoffload_socket_reply reply;
  return Exchange(request, sizeof(*request), descriptors, SUPEROFFLOAD_SOCKET_DEVICE_MEMORY, &reply);
}

Status DescriptorConnection::Exchange(const void* request, size_t bytes, std::span<const int> descriptors,
                                      superoffload_socket_kind expected, superoffload_socket_reply* reply,
                                      std::span<FileDescriptor> files) {
  const std::lock_guard<std::mutex> lock(exchange_);
  const timeval timeout = expected == SUPEROFFLOAD_SOCKET_DEVICE_MEMORY ? kShareTimeout : ReplyTimeout();
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  if (!Send(socket_.get(), request, bytes, descriptors)) return ErrnoError(Code::kUnavailable, "the daemon is gone");
  iovec iov{reply, sizeof(*reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * SUPEROFFLOAD_DESCRIPTOR_COUNT)];
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received;
  do {
    received = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  const size_t taken = received > 0 ? TakeDescriptors(message, files) : 0;
  if (received == 0) return Error(Code::kUnavailable, "the daemon closed the descriptor socket");
  if (received < 0) {
    Status silent = ErrnoError(Code::kUnavailable, "the daemon does not answer on the descriptor socket");
    Close();  // an answer that came later would be taken for that to the next request
    return silent;
  }
  if (received != static_cast<ssize_t>(sizeof(*reply)) || reply->magic != SUPEROFFLOAD_SOCKET_MAGIC) {
    return Error(Code::kUnimplemented, "what answers on the descriptor socket is no superoffloadd; check the endpoint");
  }
  if (reply->version != SUPEROFFLOAD_WIRE_VERSION) {
    return Error(Code::kFailedPrecondition, "this client speaks version ", SUPEROFFLOAD_WIRE_VERSION,
                 " of the wire, the daemon version ", reply->version, "; install the same release of both");
  }
  if (reply->kind == SUPEROFFLOAD_SOCKET_ERROR) {
    return Error(static_cast<Code>(reply->code),
                 std::string(reply->message, ::strnlen(reply->message, sizeof(reply->message))));
  }
  if (reply->kind != expected || taken != files.size()) {
    return Error(Code::kInternal, "unexpected answer on the descriptor socket: kind ", reply->kind, " with ", taken,
                 " descriptors");
  }
  return {};
}

bool DescriptorConnection::DaemonGone() const {
  pollfd polled{socket_.get(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0 && (polled.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

// The number stays this connection's: attachments that outlive it ask whether the daemon is gone.
void DescriptorConnection::Close() { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace superoffload::client
