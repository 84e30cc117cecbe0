// install-service, uninstall-service.
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string_view>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/commands.h"
#include "client/ctl/output.h"
#include "client/ctl/programs.h"
#include "client/ctl/service_files.h"

namespace superoffload::ctl {
namespace {

namespace fs = std::filesystem;

using Words = std::vector<std::string>;

constexpr const char* kPackagesUnits[] = {"/usr/lib/systemd/system/superoffloadd@.service",
                                          "/lib/systemd/system/superoffloadd@.service"};

bool Exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

// OK where a service can be installed or removed.
absl::Status CheckMachine(const Arguments& arguments, std::string_view command) {
  for (const char* unit : kPackagesUnits) {
    if (!Exists(arguments.root + unit)) continue;
    return absl::FailedPreconditionError(absl::StrCat("the Debian package has installed the service (", unit,
                                                      "): systemctl enable --now superoffloadd@", arguments.superchip,
                                                      ".socket, and apt remove superoffloadd"));
  }
  if (!Exists(arguments.root + "/run/systemd/system") && arguments.root.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no systemd runs here; run the daemon under its keeper, which keeps optimizers over its death: ",
                     (ThisProgram().parent_path() / "superoffloadd").string(), " --keeper"));
  }
  if (arguments.root.empty() && ::geteuid() != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("services are installed by root: sudo ", ThisProgram().string(), " ", std::string(command)));
  }
  return absl::OkStatus();
}

// Asked on a terminal only.
bool Wanted(const Arguments& arguments) {
  if (arguments.yes) return true;
  if (::isatty(STDIN_FILENO) == 0) {
    std::printf("nothing is done; --yes does it\n");
    return false;
  }
  std::printf("Do this? [y/N] ");
  std::fflush(stdout);
  std::string answer;
  std::getline(std::cin, answer);
  return absl::StartsWithIgnoreCase(answer, "y");
}

void Show(const std::vector<FileChange>& changes, const std::vector<Words>& before, const std::vector<Words>& after) {
  for (const Words& words : before) std::printf("run      %s\n", absl::StrJoin(words, " ").c_str());
  size_t libraries = 0;
  for (const FileChange& change : changes) {
    if (absl::StrContains(change.path, "/superoffload.libs/")) {
      ++libraries;
    } else {
      std::printf("%s\n", ChangeText(change).c_str());
    }
  }
  if (libraries > 0) std::printf("and      %zu libraries in %s/superoffload.libs\n", libraries, kServiceHome);
  for (const Words& words : after) std::printf("run      %s\n", absl::StrJoin(words, " ").c_str());
}

absl::Status Run(const std::vector<Words>& commands) {
  for (const Words& words : commands) {
    const ChildResult done = RunChild(words, "");
    if (done.status == 0) continue;
    return absl::InternalError(
        absl::StrCat("\"", absl::StrJoin(words, " "), "\" failed with status ", done.status, ": ", done.output));
  }
  return absl::OkStatus();
}

absl::Status ApplyAll(const Arguments& arguments, const std::vector<FileChange>& changes) {
  for (const FileChange& change : changes) {
    if (absl::Status status = Apply(arguments.root, change); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// What daemons that have stopped leave, but for checkpoints.
void RemoveTraces() {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator("/run", error)) {
    const std::string name = entry.path().filename();
    if (name == "superoffloadd" && entry.is_symlink(error)) fs::remove(entry.path(), error);
    if (absl::StartsWith(name, "superoffloadd-")) fs::remove_all(entry.path(), error);
  }
  const fs::path state = "/var/lib/superoffloadd";
  std::vector<fs::path> folders;
  for (const fs::directory_entry& entry : fs::directory_iterator(state, error)) folders.push_back(entry.path());
  folders.push_back(state);
  for (const fs::path& folder : folders) fs::remove(folder, error);  // one that is not empty stays
}

absl::Status Install(const Arguments& arguments) {
  if (absl::Status status = CheckMachine(arguments, "install-service"); !status.ok()) return status;
  absl::StatusOr<std::vector<FileChange>> changes =
      ServiceFiles(arguments.root, ThisProgram().parent_path().parent_path(), arguments.superchip);
  if (!changes.ok()) return changes.status();
  const std::string socket = absl::StrCat("superoffloadd@", arguments.superchip, ".socket");
  const bool enabled = arguments.root.empty() && RunChild({"systemctl", "-q", "is-active", socket}, "").status == 0;
  const bool same = std::all_of(changes->begin(), changes->end(),
                                [](const FileChange& change) { return change.kind == FileChange::Kind::kKeep; });
  if (same && (enabled || !arguments.root.empty())) {
    std::printf("the service is installed already, as this superoffloadctl would install it\n");
    return absl::OkStatus();
  }
  std::vector<Words> commands;
  if (arguments.root.empty()) {
    commands = {{"systemd-sysusers", "superoffloadd.conf"},
                {"systemd-tmpfiles", "--create", "superoffloadd.conf"},
                {"systemctl", "daemon-reload"},
                {"systemctl", "enable", "--now", socket}};
  }
  Show(*changes, {}, commands);
  if (!Wanted(arguments)) return absl::OkStatus();
  absl::Status status = ApplyAll(arguments, *changes);
  if (status.ok()) status = Run(commands);
  if (!status.ok()) return status;
  std::printf("done: the first connection to /run/superoffloadd-%u/control.sock starts the daemon\n",
              arguments.superchip);
  if (enabled) {
    std::printf(
        "a daemon that runs already goes on with the old program: superoffloadctl check-upgrade, and then\n"
        "systemctl restart superoffloadd@%u, over which optimizers stay\n",
        arguments.superchip);
  }
  return absl::OkStatus();
}

absl::Status Uninstall(const Arguments& arguments) {
  if (absl::Status status = CheckMachine(arguments, "uninstall-service"); !status.ok()) return status;
  const std::vector<FileChange> changes = InstalledServiceFiles(arguments.root);
  if (changes.empty()) {
    std::printf("no service is installed that install-service could have installed\n");
    return absl::OkStatus();
  }
  std::vector<Words> before, after;
  if (arguments.root.empty()) {
    before = {{"systemctl", "disable", "superoffloadd@.socket", "superoffloadd@.service"},
              {"systemctl", "stop", "superoffloadd@*.socket", "superoffloadd@*.service"}};
    after = {{"systemctl", "daemon-reload"}};
    if (::getpwnam("superoffload") != nullptr) after.push_back({"userdel", "superoffload"});
  }
  Show(changes, before, after);
  std::printf(
      "the daemon stops, and the memory of its optimizers is freed; checkpoints in /var/lib/superoffloadd stay\n");
  if (!Wanted(arguments)) return absl::OkStatus();
  absl::Status status = Run(before);
  if (status.ok()) status = ApplyAll(arguments, changes);
  if (status.ok() && arguments.root.empty()) RemoveTraces();
  if (status.ok()) status = Run(after);
  return status;
}

}  // namespace

int InstallService(const Arguments& arguments) { return ExitStatus(Install(arguments)); }
int UninstallService(const Arguments& arguments) { return ExitStatus(Uninstall(arguments)); }

}  // namespace superoffload::ctl
