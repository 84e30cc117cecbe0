// Where the sockets of a daemon are that nobody has named: daemon and clients must agree. client/python has the same
// list (superoffload/_core/daemon.py); tests/integration/test_endpoints.py holds them together.
#ifndef SUPEROFFLOAD_V1_RUNTIME_DIRECTORY_H_
#define SUPEROFFLOAD_V1_RUNTIME_DIRECTORY_H_

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace superoffload {

// In the runtime directory.
inline constexpr char kControlSocket[] = "control.sock";
inline constexpr char kDescriptorSocket[] = "descriptors.sock";

// $XDG_RUNTIME_DIR/superoffloadd where that is set, /run/superoffloadd and /tmp/superoffloadd-UID. Clients look in all,
// in this order.
inline std::vector<std::string> RuntimeDirectories() {
  std::vector<std::string> directories;
  const char* const user = std::getenv("XDG_RUNTIME_DIR");
  if (user != nullptr && *user != '\0') directories.push_back(std::string(user) + "/superoffloadd");
  directories.push_back("/run/superoffloadd");
  directories.push_back("/tmp/superoffloadd-" + std::to_string(::geteuid()));
  return directories;
}

// The first of them that the calling process may have: /run is root's.
inline std::string OwnRuntimeDirectory() {
  const std::vector<std::string> directories = RuntimeDirectories();
  return ::geteuid() == 0 || directories.size() == 3 ? directories.front() : directories.back();
}

}  // namespace superoffload

#endif  // SUPEROFFLOAD_V1_RUNTIME_DIRECTORY_H_
