#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "superoffload/client.hpp"

namespace superoffload {
namespace {

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

absl::StatusOr<std::string> ResolveEndpoint(const std::string& endpoint) {
  const std::string given = endpoint.empty() ? Environment("SUPEROFFLOAD_ENDPOINT") : endpoint;
  if (!given.empty()) return given.front() == '/' ? absl::StrCat("unix:", given) : given;
  std::vector<std::string> places;
  if (std::string run = Environment("XDG_RUNTIME_DIR"); !run.empty()) places.push_back(run + "/superoffloadd");
  places.push_back("/run/superoffloadd");
  places.push_back(absl::StrCat("/tmp/superoffloadd-", ::geteuid()));
  for (const std::string& place : places) {
    std::error_code error;
    if (std::filesystem::is_socket(place + "/control.sock", error))
      return absl::StrCat("unix:", place, "/control.sock");
  }
  return absl::UnavailableError(absl::StrCat("no superoffloadd listens in ", absl::StrJoin(places, ", "),
                                             "; start one, or name its endpoint (unix:/path/control.sock)"));
}

}  // namespace superoffload
