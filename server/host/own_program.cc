#include "server/host/own_program.h"

#include <unistd.h>

#include <climits>

namespace superoffload::host {
namespace {

constexpr char kSelf[] = "/proc/self/exe";

// Empty when it cannot be known.
std::string PathOfSelf() {
  std::string path(PATH_MAX, '\0');
  const ssize_t length = ::readlink(kSelf, path.data(), path.size());
  path.resize(length > 0 ? static_cast<size_t>(length) : 0);
  return path;
}

// At the start: an upgrade moves the file away, or deletes it.
const std::string path_at_start = PathOfSelf();

}  // namespace

std::string OwnProgram() {
  const bool replaced = PathOfSelf() != path_at_start && ::access(path_at_start.c_str(), X_OK) == 0;
  return replaced ? path_at_start : kSelf;
}

}  // namespace superoffload::host
