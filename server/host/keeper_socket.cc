#include "server/host/keeper_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/host/log.h"
#include "superoffload/v1/keeper_socket.h"

namespace superoffload::host {
namespace {

constexpr timeval kPatience{.tv_sec = 1, .tv_usec = 0};

std::string ErrorText(const absl::Status& status) {
  return absl::StrCat(static_cast<int>(status.code()), " ", status.message(), "\n");
}

void Send(int connection, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t now = ::send(connection, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (now <= 0) return;
    sent += static_cast<size_t>(now);
  }
}

}  // namespace

void KeeperSocket::Serve(KeptDescriptors& kept, bool daemon_runs) {
  ucred peer{};
  const memory::FileDescriptor connection = acceptor_->Accept(&peer);
  if (!connection.valid()) return;
  ::fcntl(connection.get(), F_SETFL, 0);  // blocking, for so long
  ::setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
  ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
  if (peer.uid != 0 && peer.uid != ::geteuid()) {
    Send(connection.get(), ErrorText(absl::PermissionDeniedError(absl::StrCat(
                               "the keeper answers root and its own uid ", ::geteuid(), ", not uid ", peer.uid))));
    return;
  }
  char request[SUPEROFFLOAD_KEEPER_REQUEST_BYTES];
  const ssize_t received = ::recv(connection.get(), request, sizeof(request), 0);
  if (received <= 0) return;
  Send(connection.get(), Answer(std::string(request, static_cast<size_t>(received)), kept, daemon_runs));
}

std::string KeeperSocket::Answer(const std::string& request, KeptDescriptors& kept, bool daemon_runs) {
  if (request == "LIST") {
    std::string text = "OK\n";
    for (const auto& [name, bytes] : kept.Bytes()) absl::StrAppend(&text, bytes, " ", name, "\n");
    return text;
  }
  absl::string_view name = request;
  if (!absl::ConsumePrefix(&name, "DROP ")) return ErrorText(absl::InvalidArgumentError("LIST or DROP NAME"));
  if (daemon_runs) {
    return ErrorText(absl::FailedPreconditionError(
        "the daemon runs, or is being started; use superoffloadctl delete, or try again when it has ended"));
  }
  if (!kept.Drop(std::string(name))) return ErrorText(absl::NotFoundError(absl::StrCat("nothing is kept as ", name)));
  LogWarning(absl::StrCat("the memory of ", name, " was dropped on an operator's word"));
  return "OK\n";
}

}  // namespace superoffload::host
