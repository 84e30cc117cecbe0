#include "server/transport/unix_listener.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::transport {
namespace {

memory::FileDescriptor OpenNothing() { return memory::FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

absl::StatusOr<memory::FileDescriptor> ListenOn(int directory, const std::string& name, const std::string& path,
                                                int type) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the socket path ", path, " is longer than ",
                                                   sizeof(address.sun_path) - 1,
                                                   " bytes; choose a shorter runtime_directory"));
  }
  const std::string aside = absl::StrCat(".", name, ".new");
  // There is no bindat(): this way it is the directory of the descriptor, whatever its path has become meanwhile.
  const std::string place = absl::StrCat("/proc/self/fd/", directory, "/", aside);
  std::memcpy(address.sun_path, place.c_str(), place.size() + 1);
  ::unlinkat(directory, aside.c_str(), 0);  // left by a daemon that was killed
  memory::FileDescriptor listener(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid() || ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::fchmodat(directory, aside.c_str(), 0666, 0) != 0 || ::listen(listener.get(), 128) != 0 ||
      ::renameat(directory, aside.c_str(), directory, name.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("listening on ", path));
  }
  return listener;
}

Acceptor::Acceptor(memory::FileDescriptor listener) : listener_(std::move(listener)), reserve_(OpenNothing()) {}

memory::FileDescriptor Acceptor::Accept(ucred* peer) {
  memory::FileDescriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid() && (errno == EMFILE || errno == ENFILE)) {
    reserve_ = memory::FileDescriptor();
    fd = memory::FileDescriptor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    fd = memory::FileDescriptor();
    reserve_ = OpenNothing();
  }
  socklen_t size = sizeof(*peer);
  if (!fd.valid() || ::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, peer, &size) != 0) return {};
  return fd;
}

}  // namespace superoffload::transport
