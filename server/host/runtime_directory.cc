#include "server/host/runtime_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/host/owned_directory.h"
#include "server/transport/unix_listener.h"

namespace superoffload::host {

absl::StatusOr<std::unique_ptr<RuntimeDirectory>> RuntimeDirectory::Claim(const std::string& path, bool make,
                                                                          memory::FileDescriptor inherited) {
  absl::StatusOr<memory::FileDescriptor> directory =
      OpenOwnedDirectory("runtime_directory", path, make ? std::optional<mode_t>(0755) : std::nullopt);
  if (!directory.ok()) return directory.status();
  std::unique_ptr<RuntimeDirectory> claimed(new RuntimeDirectory(path, *std::move(directory)));
  if (absl::Status status = claimed->Lock(); !status.ok()) return status;
  if (absl::Status status = claimed->Succeed(std::move(inherited)); !status.ok()) return status;
  return claimed;
}

absl::StatusOr<memory::FileDescriptor> RuntimeDirectory::OpenLock(const char* name) const {
  memory::FileDescriptor lock(::openat(directory_.get(), name, O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("opening ", PathOf(name)));
  return lock;
}

absl::Status RuntimeDirectory::Lock() {
  absl::StatusOr<memory::FileDescriptor> lock = OpenLock("lock");
  if (!lock.ok()) return lock.status();
  lock_ = *std::move(lock);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("another superoffloadd serves ", path_, "; stop it or choose another runtime_directory"));
}

// A lock belongs to what was opened, whoever has descriptors of it; what was inherited is locked already.
absl::Status RuntimeDirectory::Succeed(memory::FileDescriptor inherited) {
  absl::StatusOr<memory::FileDescriptor> opened = OpenLock("succession.lock");
  if (!opened.ok()) return opened.status();
  struct stat there{}, theirs{};
  const bool same = inherited.valid() && ::fstat(opened->get(), &there) == 0 &&
                    ::fstat(inherited.get(), &theirs) == 0 && there.st_dev == theirs.st_dev &&
                    there.st_ino == theirs.st_ino;
  succession_ = same ? std::move(inherited) : *std::move(opened);
  if (::flock(succession_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the superoffloadd that served ", path_,
                   " has died, and is about to be started again with its "
                   "optimizers by its keeper or systemd; wait for it, stop that, or choose another runtime_directory"));
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

}  // namespace superoffload::host
