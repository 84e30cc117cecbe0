// What "superoffloadctl install-service" puts on a machine, and "uninstall-service" takes away again.
#ifndef SUPEROFFLOAD_CLIENT_CTL_SERVICE_FILES_H_
#define SUPEROFFLOAD_CLIENT_CTL_SERVICE_FILES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace superoffload::ctl {

// Where the programs of a wheel are copied: a virtual environment may be moved, or be out of the service's sight.
inline constexpr char kServiceHome[] = "/usr/local/lib/superoffload";

struct FileChange {
  enum class Kind {
    kCreate,
    kReplace,
    kKeep,  // somebody has changed it, and it is configuration
    kRemove,
  };
  Kind kind;
  std::string path;      // as the machine sees it
  std::string content;   // of what is created or replaced; of a link, where it leads
  unsigned mode = 0644;  // 0: a symbolic link
};

// What differs from what an installation would put below `root`. `package` is the unpacked wheel's folder with bin/,
// lib/ and share/. NOT_FOUND: it has no units.
absl::StatusOr<std::vector<FileChange>> ServiceFiles(const std::string& root, const std::string& package,
                                                     unsigned superchip);

// What is below `root` of an installation. Configuration that was changed stays.
std::vector<FileChange> InstalledServiceFiles(const std::string& root);

// Does it. A running program is replaced, not written to. Empty directories go with the last of their files.
absl::Status Apply(const std::string& root, const FileChange& change);

// One line.
std::string ChangeText(const FileChange& change);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_SERVICE_FILES_H_
