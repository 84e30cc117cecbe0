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
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/cpp/superchips.h"
#include "superoffload/client.hpp"
#include "superoffload/v1/file_descriptor.h"
#include "superoffload/v1/runtime_directory.h"

namespace superoffload {
namespace {

// Directories there were given to their owners by root.
constexpr char kRootsDirectory[] = "/run";

// Who, beside this user and root, could receive a trainer's weights at a socket that was not named.
std::optional<uid_t> Stranger(const std::string& directory, const std::string& path) {
  const auto trusted = [](uid_t uid) { return uid == ::geteuid() || uid == 0; };
  struct stat file{};
  if (::lstat(directory.c_str(), &file) == 0 && !trusted(file.st_uid) &&
      std::filesystem::path(directory).parent_path() != kRootsDirectory) {
    return file.st_uid;
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return std::nullopt;  // nobody can connect
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const FileDescriptor peer(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::getsockopt(peer.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return std::nullopt;
  }
  return trusted(credentials.uid) ? std::nullopt : std::optional<uid_t>(credentials.uid);
}

// Of the daemon in that directory, and of those of other Superchips beside it.
std::vector<std::string> TrustedEndpoints(const std::string& directory, std::string* passed_over) {
  std::vector<std::string> endpoints;
  std::vector<std::string> sockets = SiblingSockets(directory);
  sockets.insert(sockets.begin(), absl::StrCat(directory, "/", kControlSocket));
  for (const std::string& path : sockets) {
    std::error_code error;
    if (!std::filesystem::is_socket(path, error)) continue;
    if (const std::optional<uid_t> stranger = Stranger(std::filesystem::path(path).parent_path(), path)) {
      absl::StrAppend(passed_over, "; ", path, " is that of uid ", *stranger,
                      ", who is neither you nor root, and is used only when it is named");
    } else {
      endpoints.push_back(absl::StrCat("unix:", path));
    }
  }
  return endpoints;
}

}  // namespace

std::vector<std::string> MachineEndpoints() {
  std::vector<std::string> endpoints;
  std::string passed_over;
  for (const std::string& place : RuntimeDirectories()) {
    for (std::string& endpoint : TrustedEndpoints(place, &passed_over)) endpoints.push_back(std::move(endpoint));
  }
  return endpoints;
}

absl::StatusOr<std::string> ResolveEndpoint(const std::string& endpoint) {
  const char* const environment = std::getenv("SUPEROFFLOAD_ENDPOINT");
  const std::string given = endpoint.empty() && environment != nullptr ? environment : endpoint;
  if (!given.empty()) {
    const bool path = given.front() == '/' || given.find(':') == std::string::npos;
    return FillLocalRank(path ? absl::StrCat("unix:", given) : given);
  }
  const std::vector<std::string> places = RuntimeDirectories();
  std::string passed_over;
  for (const std::string& place : places) {
    const std::vector<std::string> found = TrustedEndpoints(place, &passed_over);
    if (!found.empty()) return found.size() == 1 ? found.front() : ChooseEndpoint(found);
  }
  return absl::UnavailableError(absl::StrCat("no superoffloadd listens in ", absl::StrJoin(places, ", "), passed_over,
                                             "; start one, or name its endpoint (unix:/path/control.sock)"));
}

}  // namespace superoffload
