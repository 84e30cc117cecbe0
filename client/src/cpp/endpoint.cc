#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/file_descriptor.h"
#include "superoffload/client.hpp"

namespace superoffload {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Who, beside this user and root, could receive a trainer's weights at a socket that was not named.
std::optional<uid_t> Stranger(const std::string& directory, const std::string& path) {
  const auto trusted = [](uid_t uid) { return uid == ::geteuid() || uid == 0; };
  struct stat file {};
  if (::lstat(directory.c_str(), &file) == 0 && !trusted(file.st_uid)) return file.st_uid;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return std::nullopt;  // nobody can connect
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const client::FileDescriptor peer(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::getsockopt(peer.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return std::nullopt;
  }
  return trusted(credentials.uid) ? std::nullopt : std::optional<uid_t>(credentials.uid);
}

}  // namespace

absl::StatusOr<std::string> ResolveEndpoint(const std::string& endpoint) {
  const std::string given = endpoint.empty() ? Environment("SUPEROFFLOAD_ENDPOINT") : endpoint;
  if (!given.empty()) return given.front() == '/' ? absl::StrCat("unix:", given) : given;
  std::vector<std::string> places;
  if (std::string run = Environment("XDG_RUNTIME_DIR"); !run.empty()) places.push_back(run + "/superoffloadd");
  places.push_back("/run/superoffloadd");
  places.push_back(absl::StrCat("/tmp/superoffloadd-", ::geteuid()));
  std::string passed_over;
  for (const std::string& place : places) {
    std::error_code error;
    const std::string path = place + "/control.sock";
    if (!std::filesystem::is_socket(path, error)) continue;
    if (const std::optional<uid_t> stranger = Stranger(place, path)) {
      absl::StrAppend(&passed_over, "; ", path, " is that of uid ", *stranger,
                      ", who is neither you nor root, and is used only when it is named");
      continue;
    }
    return absl::StrCat("unix:", path);
  }
  return absl::UnavailableError(absl::StrCat("no superoffloadd listens in ", absl::StrJoin(places, ", "),
                                             passed_over,
                                             "; start one, or name its endpoint (unix:/path/control.sock)"));
}

}  // namespace superoffload
