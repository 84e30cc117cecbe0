#include "server/host/runtime_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/host/owned_directory.h"
#include "server/transport/unix_listener.h"

namespace superoffload::host {

absl::StatusOr<std::unique_ptr<RuntimeDirectory>> RuntimeDirectory::Claim(const std::string& path, bool make) {
  absl::StatusOr<memory::FileDescriptor> directory =
      OpenOwnedDirectory("runtime_directory", path, make ? std::optional<mode_t>(0755) : std::nullopt);
  if (!directory.ok()) return directory.status();
  std::unique_ptr<RuntimeDirectory> claimed(new RuntimeDirectory(path, *std::move(directory)));
  if (absl::Status status = claimed->Lock(); !status.ok()) return status;
  return claimed;
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

}  // namespace superoffload::host
