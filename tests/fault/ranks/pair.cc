#include "tests/fault/ranks/pair.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::fault {
namespace {

constexpr timeval kGatherPatience{.tv_sec = 30, .tv_usec = 0};
constexpr size_t kLongestMessage = 1024;

FileDescriptor Socket() {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) std::abort();
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &kGatherPatience, sizeof(kGatherPatience));
  return fd;
}

sockaddr_un Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
  return address;
}

}  // namespace

Meeting::Meeting(const std::string& path, uint32_t rank) : path_(path), rank_(rank) {
  if (rank != 0) return;
  listener_ = Socket();
  ::unlink(path.c_str());
  const sockaddr_un address = Address(path);
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener_.get(), 8) != 0) {
    std::abort();
  }
}

absl::StatusOr<Pair> Meeting::Join() const {
  if (rank_ == 0) {
    FileDescriptor peer(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.valid()) return absl::DeadlineExceededError("rank 1 does not come");
    ::setsockopt(peer.get(), SOL_SOCKET, SO_RCVTIMEO, &kGatherPatience, sizeof(kGatherPatience));
    return Pair(rank_, std::move(peer));
  }
  FileDescriptor peer = Socket();
  const sockaddr_un address = Address(path_);
  if (::connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError("rank 0 is not there");
  }
  return Pair(rank_, std::move(peer));
}

absl::StatusOr<std::array<std::string, 2>> Pair::Gather(const std::string& own) const {
  std::array<std::string, 2> messages;
  messages[rank_] = own;
  if (::send(peer_.get(), own.data(), own.size(), MSG_NOSIGNAL) < 0) return absl::UnavailableError("the peer has left");
  std::string& theirs = messages[1 - rank_];
  theirs.resize(kLongestMessage);
  const ssize_t received = ::recv(peer_.get(), theirs.data(), theirs.size(), 0);
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    return absl::DeadlineExceededError(absl::StrCat("rank ", 1 - rank_, " hangs"));
  }
  if (received <= 0) return absl::UnavailableError("the peer has left");
  theirs.resize(static_cast<size_t>(received));
  return messages;
}

}  // namespace superoffload::fault
