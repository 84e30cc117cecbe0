#include "server/runtime_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/transport/unix_listener.h"

namespace superoffload {

absl::StatusOr<std::unique_ptr<RuntimeDirectory>> RuntimeDirectory::Claim(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (error || (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST)) {
    return absl::UnavailableError(absl::StrCat("cannot create runtime_directory ", path, ": ",
                                               error ? error.message() : std::strerror(errno)));
  }
  memory::FileDescriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("opening runtime_directory ", path));
  std::unique_ptr<RuntimeDirectory> claimed(new RuntimeDirectory(path, std::move(directory)));
  if (absl::Status status = claimed->CheckOwner(); !status.ok()) return status;
  if (absl::Status status = claimed->Lock(); !status.ok()) return status;
  return claimed;
}

absl::Status RuntimeDirectory::CheckOwner() const {
  struct stat file {};
  if (::fstat(directory_.get(), &file) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("looking at ", path_));
  if (file.st_uid != ::geteuid() && file.st_uid != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("runtime_directory ", path_, " belongs to uid ", file.st_uid, ", who could take the place of this "
                     "daemon (uid ", ::geteuid(), ") there; choose a directory of your own"));
  }
  if ((file.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "others may write to runtime_directory %s (mode %04o) and take the place of this daemon there; use chmod 0755, "
        "or choose another directory",
        path_, file.st_mode & 07777));
  }
  return absl::OkStatus();
}

absl::Status RuntimeDirectory::Lock() {
  lock_ = memory::FileDescriptor(::openat(directory_.get(), "lock", O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock_.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("opening ", PathOf("lock")));
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another superoffloadd serves ", path_, "; stop it or choose another runtime_directory"));
  }
  return absl::OkStatus();
}

RuntimeDirectory::~RuntimeDirectory() { RemoveSockets(); }

absl::StatusOr<memory::FileDescriptor> RuntimeDirectory::Listen(const std::string& name, int type) {
  absl::StatusOr<memory::FileDescriptor> listener = transport::ListenOn(directory_.get(), name, PathOf(name), type);
  if (listener.ok()) sockets_.push_back(name);
  return listener;
}

void RuntimeDirectory::RemoveSockets() {
  for (const std::string& name : sockets_) ::unlinkat(directory_.get(), name.c_str(), 0);
  sockets_.clear();
}

}  // namespace superoffload
