#include "client/ctl/upgrade.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/child.h"

namespace superoffload::ctl {

std::string InstalledDaemon() {
  std::error_code error;
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* place : {"superoffloadd", "../server/superoffloadd"}) {
    if (std::filesystem::exists(here / place, error)) return (here / place).lexically_normal();
  }
  return "/usr/bin/superoffloadd";
}

std::string DaemonProgram() {
  const char* const given = std::getenv("SUPEROFFLOAD_DAEMON");
  return given != nullptr && *given != '\0' ? given : InstalledDaemon();
}

absl::StatusOr<std::string> CheckUpgrade(const v1::ServerInfo& running, const std::string& program) {
  unsigned oldest = 0, newest = 0;
  const ChildResult said = RunChild({program, "--record_versions"}, "");
  if (said.status != 0 || std::sscanf(said.output.c_str(), "%u %u", &oldest, &newest) != 2) {
    return absl::UnavailableError(absl::StrCat(program, " does not say which records it reads; name a superoffloadd "
                                                        "that knows --record_versions"));
  }
  const std::string reads = absl::StrCat(program, " reads records of versions ", oldest, " to ", newest);
  if (running.optimizers() == 0) return absl::StrCat(reads, "; the running daemon hosts no optimizer\n");
  bool all = running.record_versions_size() > 0;
  for (const uint32_t version : running.record_versions()) all = all && version >= oldest && version <= newest;
  const std::string has =
      running.record_versions().empty()
          ? std::string("does not tell its own")
          : absl::StrCat("has optimizers of version ", absl::StrJoin(running.record_versions(), ", "));
  if (all) return absl::StrCat(reads, "; the running daemon ", has, ": it will recover them\n");
  return absl::FailedPreconditionError(absl::StrCat(
      reads, ", and the running daemon ", running.version(), " ", has,
      ": take checkpoints of its ", running.optimizers(), " optimizers before you replace it, and restore them after"));
}

}  // namespace superoffload::ctl
