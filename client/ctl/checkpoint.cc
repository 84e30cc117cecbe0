#include "client/ctl/checkpoint.h"

#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/ctl/child.h"
#include "client/ctl/upgrade.h"

namespace superoffload::ctl {
namespace {

namespace fs = std::filesystem;

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const std::string absolute = fs::absolute(path, error).lexically_normal();
  return absolute.size() > 1 && absolute.back() == '/' ? absolute.substr(0, absolute.size() - 1) : absolute;
}

int RunDaemonProgram(std::vector<std::string> flags) {
  const std::string program = DaemonProgram();
  flags.insert(flags.begin(), program);
  const ChildResult child = RunChild(std::move(flags), "");
  std::fwrite(child.output.data(), 1, child.output.size(), stdout);
  if (child.status < 0) {
    std::fprintf(stderr, "superoffloadctl: cannot run %s; install superoffloadd beside superoffloadctl, or point "
                         "$SUPEROFFLOAD_DAEMON at it\n", program.c_str());
    return 1;
  }
  return std::fflush(stdout) == 0 ? child.status : 1;
}

}  // namespace

bool IsDirectory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

int InspectCheckpoint(const std::string& path, bool json, bool verify) {
  return RunDaemonProgram({absl::StrCat("--inspect_checkpoint=", AbsolutePath(path)), json ? "--json" : "--nojson",
                           verify ? "--verify" : "--noverify"});
}

int ExportCheckpoint(const std::string& path, const std::string& target, const ModelOptions& options) {
  std::vector<std::string> flags{absl::StrCat("--export_checkpoint=", AbsolutePath(path)),
                                 absl::StrCat("--export_to=", AbsolutePath(target)),
                                 absl::StrCat("--export_dtype=", options.dtype),
                                 absl::StrCat("--export_shard_bytes=", options.shard_bytes)};
  if (!options.source.empty()) flags.push_back(absl::StrCat("--export_source=", AbsolutePath(options.source)));
  return RunDaemonProgram(std::move(flags));
}

}  // namespace superoffload::ctl
