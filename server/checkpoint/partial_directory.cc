#include "server/checkpoint/partial_directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/checkpoint/files.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr char kSuffix[] = ".partial";
constexpr int kAttempts = 10;

// Holds the lock of a directory that is still at `path`. Whoever has it is alive; what nobody holds was left by a
// daemon that was killed. Returns an errno, EWOULDBLOCK for a lock that somebody holds, ENOENT for a directory that was
// removed meanwhile.
int Lock(const fs::path& path, memory::FileDescriptor* lock) {
  *lock = memory::FileDescriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!lock->valid() || ::flock(lock->get(), LOCK_EX | LOCK_NB) != 0) return errno;
  struct stat held, there;
  const bool same = ::fstat(lock->get(), &held) == 0 && ::lstat(path.c_str(), &there) == 0 &&
                    held.st_ino == there.st_ino && held.st_dev == there.st_dev;
  return same ? 0 : ENOENT;
}

absl::Status TargetExists(const fs::path& target) {
  return absl::AlreadyExistsError(absl::StrCat(target.string(), " exists; remove it or choose another directory"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PartialDirectory>> PartialDirectory::Create(const fs::path& target) {
  if (!target.is_absolute() || !target.has_filename()) {
    return absl::InvalidArgumentError(
        absl::StrCat("directory is \"", target.string(), "\" but must be an absolute path that ends with a name"));
  }
  std::error_code error;
  if (fs::exists(fs::symlink_status(target, error))) return TargetExists(target);
  const fs::path path = target.parent_path() / absl::StrCat(".", target.filename().string(), kSuffix);
  memory::FileDescriptor fd;
  int failure = ENOENT;
  for (int i = 0; failure == ENOENT && i < kAttempts; ++i) {  // somebody sweeps it at the same time
    const bool made = ::mkdir(path.c_str(), 0755) == 0;
    if (!made && errno != EEXIST) return FileError(errno, "creating", path);
    failure = Lock(path, &fd);
    if (failure != 0 || made) continue;
    fs::remove_all(path, error);  // what a killed daemon has left; its mode says nothing of today's umask
    if (error) return FileError(error.value(), "removing", path);
    failure = ENOENT;
  }
  if (failure != 0 && failure != EWOULDBLOCK) return FileError(failure, "opening", path);
  if (failure != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another checkpoint is being written to ", target.string(), "; choose another directory"));
  }
  struct stat there{};
  std::optional<mode_t> mode;
  if (::fstat(fd.get(), &there) == 0 && ::fchmod(fd.get(), (there.st_mode & S_ISGID) | 0700) == 0) {
    mode = there.st_mode & 07777;
  }
  return std::unique_ptr<PartialDirectory>(new PartialDirectory(target, path, std::move(fd), mode));
}

PartialDirectory::~PartialDirectory() {
  std::error_code ignored;
  if (!published_) fs::remove_all(path_, ignored);
}

absl::Status PartialDirectory::LetOthersRead() const {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_, error)) {
    if (::chmod(entry.path().c_str(), *mode_ & 0666) != 0) {
      return FileError(errno, "changing the mode of", entry.path());
    }
  }
  if (error) return FileError(error.value(), "reading", path_);
  return ::fchmod(lock_.get(), *mode_) == 0 ? absl::OkStatus() : FileError(errno, "changing the mode of", path_);
}

absl::Status PartialDirectory::Publish() {
  if (mode_) {
    if (absl::Status status = LetOthersRead(); !status.ok()) return status;
  }
  if (absl::Status status = SyncDirectory(path_); !status.ok()) return status;
  if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) != 0) {
    // File systems without the flag: the check at the start has to do.
    if (errno == EEXIST) return TargetExists(target_);
    if (errno != EINVAL || ::rename(path_.c_str(), target_.c_str()) != 0) {
      return FileError(errno, "renaming to", target_);
    }
  }
  published_ = true;
  return SyncDirectory(target_.parent_path());
}

void RemoveLeftPartials(const fs::path& directory, const std::function<bool(absl::string_view)>& is_ours) {
  std::error_code error;
  std::vector<fs::path> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string file = entry.path().filename();
    absl::string_view name = file;
    if (absl::ConsumePrefix(&name, ".") && absl::ConsumeSuffix(&name, kSuffix) && is_ours(name)) {
      left.push_back(entry.path());
    }
  }
  for (const fs::path& path : left) {
    if (memory::FileDescriptor lock; Lock(path, &lock) == 0) fs::remove_all(path, error);
  }
}

}  // namespace superoffload::checkpoint
