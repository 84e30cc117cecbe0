#include "server/checkpoint/files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {
namespace {

// What one call may move: the kernel's limit is a little below 2 GiB.
constexpr size_t kMaxBytesPerCall = size_t{1} << 30;

// Without the magic links of /proc: they lead past directories that the user may not enter, and to files that the
// daemon has open. EPERM and ENOSYS are of containers and emulators that do not know the call.
memory::FileDescriptor OpenWithoutMagicLinks(const std::string& path, uint64_t flags) {
  open_how how{};
  how.flags = flags;
  how.resolve = RESOLVE_NO_MAGICLINKS;
  const long fd = ::syscall(SYS_openat2, AT_FDCWD, path.c_str(), &how, sizeof(how));
  if (fd < 0 && (errno == ENOSYS || errno == EPERM)) {
    return memory::FileDescriptor(::open(path.c_str(), static_cast<int>(flags)));
  }
  return memory::FileDescriptor(static_cast<int>(fd));
}

bool IsKernels(int fd) {
  struct statfs there{};
  return ::fstatfs(fd, &there) == 0 && there.f_type == PROC_SUPER_MAGIC;
}

}  // namespace

absl::Status FileError(int error, const std::string& action, const std::string& path) {
  if (error == ENOSPC || error == EDQUOT) {
    return absl::ResourceExhaustedError(
        absl::StrCat(action, " ", path, ": ", std::strerror(error), "; free disk space or choose another directory"));
  }
  return absl::ErrnoToStatus(error, absl::StrCat(action, " ", path));
}

absl::StatusOr<File> File::Create(const std::string& path, uint64_t bytes, mode_t mode) {
  memory::FileDescriptor fd(::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, mode));
  if (!fd.valid()) return FileError(errno, "creating", path);
  // Better no space now than with half of the state written.
  if (bytes > 0 && ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0 && errno != EOPNOTSUPP) {
    return FileError(errno, "reserving space for", path);
  }
  return File(path, std::move(fd));
}

absl::StatusOr<File> File::Open(const std::string& path) {
  // To open a FIFO or a device may take for ever; a file does not mind O_NONBLOCK.
  memory::FileDescriptor fd = OpenWithoutMagicLinks(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (!fd.valid()) return FileError(errno, "opening", path);
  struct stat file{};
  if (::fstat(fd.get(), &file) != 0) return FileError(errno, "looking at", path);
  if (!S_ISREG(file.st_mode) || IsKernels(fd.get())) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file; name a checkpoint's directory"));
  }
  return File(path, std::move(fd));
}

absl::Status File::WriteAt(uint64_t offset, const void* data, size_t bytes) const {
  for (const char* from = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t written = ::pwrite(fd_.get(), from, std::min(bytes, kMaxBytesPerCall), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "writing", path_);
    from += written;
    offset += static_cast<uint64_t>(written);
    bytes -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

absl::Status File::ReadAt(uint64_t offset, void* data, size_t bytes) const {
  for (char* to = static_cast<char*>(data); bytes > 0;) {
    const ssize_t got = ::pread(fd_.get(), to, std::min(bytes, kMaxBytesPerCall), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(errno, "reading", path_);
    if (got == 0) return absl::OutOfRangeError(absl::StrCat(path_, " ends at byte ", offset, "; it was cut off"));
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::Status File::Sync() const {
  return ::fsync(fd_.get()) == 0 ? absl::OkStatus() : FileError(errno, "syncing", path_);
}

absl::StatusOr<FileIdentity> File::Identity() const {
  struct stat file{};
  if (::fstat(fd_.get(), &file) != 0) return FileError(errno, "looking at", path_);
  return FileIdentity{file.st_dev, file.st_ino, static_cast<uint64_t>(file.st_size)};
}

absl::StatusOr<uint64_t> File::Bytes() const {
  const absl::StatusOr<FileIdentity> identity = Identity();
  if (!identity.ok()) return identity.status();
  return identity->bytes;
}

absl::StatusOr<std::string> ReadText(const std::string& path, uint64_t max_bytes) {
  absl::StatusOr<File> file = File::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<uint64_t> bytes = file->Bytes();
  if (!bytes.ok()) return bytes.status();
  if (*bytes > max_bytes) return absl::DataLossError(absl::StrCat(path, " has ", *bytes, " bytes, too many"));
  std::string text(*bytes, '\0');
  if (absl::Status status = file->ReadAt(0, text.data(), text.size()); !status.ok()) return status;
  return text;
}

absl::Status In(const std::string& where, const absl::Status& status) {
  return {status.code(), absl::StrCat(where, ": ", status.message())};
}

absl::Status SyncDirectory(const std::string& path) {
  const memory::FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return FileError(errno, "opening", path);
  return ::fsync(fd.get()) == 0 ? absl::OkStatus() : FileError(errno, "syncing", path);
}

}  // namespace superoffload::checkpoint
