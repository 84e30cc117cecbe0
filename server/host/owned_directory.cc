#include "server/host/owned_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace superoffload::host {

absl::StatusOr<memory::FileDescriptor> OpenOwnedDirectory(const std::string& field, const std::string& path,
                                                          std::optional<mode_t> mode) {
  std::error_code error;
  if (mode) std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (error || (mode && ::mkdir(path.c_str(), *mode) != 0 && errno != EEXIST)) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", field, " ", path, ": ", error ? error.message() : std::strerror(errno)));
  }
  memory::FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat file{};
  if (!directory.valid() || ::fstat(directory.get(), &file) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("opening ", field, " ", path));
  }
  if (file.st_uid != ::geteuid() && file.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat(field, " ", path, " belongs to uid ", file.st_uid,
                                                    ", not to the daemon's uid ", ::geteuid(),
                                                    "; choose a directory of its own"));
  }
  if ((file.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("others may write to %s %s (mode %04o); use chmod %04o, or choose another directory", field,
                        path, file.st_mode & 07777, mode.value_or(0755)));
  }
  return directory;
}

}  // namespace superoffload::host
