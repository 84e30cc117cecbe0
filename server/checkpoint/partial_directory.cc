#include "server/checkpoint/partial_directory.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/files.h"

namespace superoffload::checkpoint {
namespace {

namespace fs = std::filesystem;

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
  const fs::path path = target.parent_path() / absl::StrCat(".", target.filename().string(), ".partial");
  // Whoever holds the lock is alive; what nobody holds was left by a daemon that was killed.
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return FileError(errno, "creating", path);
  memory::FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return FileError(errno, "opening", path);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another checkpoint is being written to ", target.string(), "; choose another directory"));
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) fs::remove_all(entry, error);
  return std::unique_ptr<PartialDirectory>(new PartialDirectory(target, path, std::move(fd)));
}

PartialDirectory::~PartialDirectory() {
  std::error_code ignored;
  if (!published_) fs::remove_all(path_, ignored);
}

absl::Status PartialDirectory::Publish() {
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

}  // namespace superoffload::checkpoint
