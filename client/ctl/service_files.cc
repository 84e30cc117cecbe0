#include "client/ctl/service_files.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace superoffload::ctl {
namespace {

namespace fs = std::filesystem;

// A line per file: its path, and for configuration the copy of what was installed.
constexpr char kManifest[] = "/usr/local/lib/superoffload/installed";
constexpr char kOriginals[] = "/usr/local/lib/superoffload/configuration/";

struct Unit {
  std::string_view source;  // in share/systemd
  std::string_view target;
  bool configuration = false;
};
constexpr Unit kUnits[] = {
    {"superoffloadd@.service", "/etc/systemd/system/superoffloadd@.service"},
    {"superoffloadd@.socket", "/etc/systemd/system/superoffloadd@.socket"},
    {"sys-fs-resctrl.mount", "/etc/systemd/system/sys-fs-resctrl.mount"},
    {"superoffloadd.sysusers", "/etc/sysusers.d/superoffloadd.conf"},
    {"superoffloadd.tmpfiles", "/etc/tmpfiles.d/superoffloadd.conf"},
    {"superoffloadd.default", "/etc/default/superoffloadd", true},
    {"superoffloadd.textproto", "/etc/superoffloadd/superoffloadd.textproto", true},
};

std::optional<std::string> Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> Manifest(const std::string& root) {
  return absl::StrSplit(Read(root + kManifest).value_or(""), '\n', absl::SkipEmpty());
}

bool IsConfiguration(std::string_view path) {
  return std::any_of(std::begin(kUnits), std::end(kUnits),
                     [&](const Unit& unit) { return unit.configuration && unit.target == path; });
}

std::string Original(std::string_view path) { return absl::StrCat(kOriginals, fs::path(path).filename().string()); }

// The units name the Debian package's places.
std::string OfThisInstallation(std::string text, std::string_view source, unsigned superchip) {
  text = absl::StrReplaceAll(
      text, {{"/usr/bin/superoffloadd", absl::StrCat(kServiceHome, "/superoffload/bin/superoffloadd")}});
  if (source == "superoffloadd.tmpfiles") {
    text = absl::StrReplaceAll(text, {{"superoffloadd-0", absl::StrCat("superoffloadd-", superchip)}});
  }
  return text;
}

// The wanted state, path to content and mode.
using WantedFiles = std::map<std::string, FileChange>;

void Want(WantedFiles& wanted, std::string path, std::string content, unsigned mode = 0644) {
  wanted[path] = {FileChange::Kind::kCreate, path, std::move(content), mode};
}

// Programs and the libraries that came with them, in the order of folders that their search paths expect.
void WantPrograms(WantedFiles& wanted, const fs::path& package) {
  std::error_code error;
  const fs::path libraries = package.parent_path() / "superoffload.libs";
  for (const auto& [folder, to] : {std::pair{package / "bin", std::string("/superoffload/bin/")},
                                   std::pair{package / "lib", std::string("/superoffload/lib/")},
                                   std::pair{libraries, std::string("/superoffload.libs/")}}) {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
      if (std::optional<std::string> content = Read(entry.path())) {
        Want(wanted, absl::StrCat(kServiceHome, to, entry.path().filename().string()), *std::move(content), 0755);
      }
    }
  }
  for (const char* name : {"superoffloadd", "superoffload-plan", "superoffloadctl"}) {
    Want(wanted, absl::StrCat("/usr/local/bin/", name), absl::StrCat(kServiceHome, "/superoffload/bin/", name), 0);
  }
}

// Empty when it already is what is wanted.
std::optional<FileChange> Difference(const std::string& root, FileChange wanted) {
  const fs::path path = root + wanted.path;
  std::error_code error;
  if (wanted.mode == 0) {
    if (fs::read_symlink(path, error) == wanted.content) return std::nullopt;
  } else if (const std::optional<std::string> there = Read(path)) {
    if (*there == wanted.content) return std::nullopt;
    if (IsConfiguration(wanted.path) && Read(root + Original(wanted.path)) != there) {
      wanted.kind = FileChange::Kind::kKeep;
    }
  }
  if (wanted.kind == FileChange::Kind::kCreate && fs::exists(fs::symlink_status(path, error))) {
    wanted.kind = FileChange::Kind::kReplace;
  }
  return wanted;
}

}  // namespace

absl::StatusOr<std::vector<FileChange>> ServiceFiles(const std::string& root, const std::string& package,
                                                     unsigned superchip) {
  WantedFiles wanted;
  WantPrograms(wanted, package);
  for (const Unit& unit : kUnits) {
    const fs::path source = fs::path(package) / "share" / "systemd" / unit.source;
    const std::optional<std::string> text = Read(source);
    if (!text) {
      return absl::NotFoundError(
          absl::StrCat("there is no ", source.string(),
                       ": this superoffloadctl did not come in a wheel; install the Debian package, "
                       "or the wheel, whose superoffloadctl brings the units"));
    }
    std::string content = OfThisInstallation(*text, unit.source, superchip);
    // A second Superchip's installation leaves /run/superoffloadd to the first.
    if (unit.source == "superoffloadd.tmpfiles") content = Read(root + std::string(unit.target)).value_or(content);
    if (unit.configuration) Want(wanted, Original(unit.target), content);
    Want(wanted, std::string(unit.target), std::move(content));
  }
  std::string manifest;
  for (const auto& [path, change] : wanted) absl::StrAppend(&manifest, path, "\n");
  Want(wanted, kManifest, manifest);
  std::vector<FileChange> changes;
  for (const std::string& old : Manifest(root)) {
    if (!wanted.contains(old)) changes.push_back({FileChange::Kind::kRemove, old, "", 0});
  }
  // Configuration before its original, which tells whether somebody has changed it.
  for (const bool configuration : {true, false}) {
    for (auto& [path, change] : wanted) {
      if (IsConfiguration(path) != configuration) continue;
      if (std::optional<FileChange> difference = Difference(root, change)) changes.push_back(*std::move(difference));
    }
  }
  return changes;
}

std::vector<FileChange> InstalledServiceFiles(const std::string& root) {
  std::vector<FileChange> changes;
  for (const std::string& path : Manifest(root)) {
    const bool changed = IsConfiguration(path) && Read(root + path) != Read(root + Original(path));
    changes.push_back({changed ? FileChange::Kind::kKeep : FileChange::Kind::kRemove, path, "", 0});
  }
  if (!changes.empty()) changes.push_back({FileChange::Kind::kRemove, kManifest, "", 0});
  return changes;
}

absl::Status Apply(const std::string& root, const FileChange& change) {
  const fs::path path = root + change.path;
  std::error_code error;
  if (change.kind == FileChange::Kind::kKeep) return absl::OkStatus();
  if (change.kind == FileChange::Kind::kRemove) {
    fs::remove(path, error);
    if (error) return absl::InternalError(absl::StrCat("cannot remove ", path.string(), ": ", error.message()));
    // Only directories of ours: the names of others do not have ours in them.
    for (fs::path folder = fs::path(change.path).parent_path(); absl::StrContains(folder.string(), "superoffload");
         folder = folder.parent_path()) {
      const fs::path there = root + folder.string();
      if (!fs::is_empty(there, error) || error || !fs::remove(there, error)) break;
    }
    return absl::OkStatus();
  }
  fs::create_directories(path.parent_path(), error);
  const fs::path fresh = path.string() + ".new";
  fs::remove(fresh, error);
  if (change.mode == 0) {
    fs::create_symlink(change.content, fresh, error);
  } else {
    std::ofstream file(fresh, std::ios::binary);
    file << change.content;
    file.close();
    if (!file) error = std::make_error_code(std::errc::io_error);
    if (!error) fs::permissions(fresh, static_cast<fs::perms>(change.mode), error);
  }
  if (!error) fs::rename(fresh, path, error);
  if (error) return absl::InternalError(absl::StrCat("cannot write ", path.string(), ": ", error.message()));
  return absl::OkStatus();
}

std::string ChangeText(const FileChange& change) {
  switch (change.kind) {
    case FileChange::Kind::kCreate:
      return absl::StrCat("create   ", change.path, change.mode == 0 ? absl::StrCat(" -> ", change.content) : "");
    case FileChange::Kind::kReplace:
      return absl::StrCat("replace  ", change.path);
    case FileChange::Kind::kKeep:
      return absl::StrCat("keep     ", change.path, ", which somebody has changed");
    case FileChange::Kind::kRemove:
      return absl::StrCat("remove   ", change.path);
  }
  return "";
}

}  // namespace superoffload::ctl
