#include "server/checkpoint/directory_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {
namespace {

std::string HostName() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

// Open with a lock of this kind; invalid where nothing can be locked. Only its owner may open it: whoever can might
// hold the lock, and the schedule with it.
absl::StatusOr<memory::FileDescriptor> Lock(const std::string& directory, const std::string& path, int lock) {
  constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  memory::FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | kFlags, 0600));
  struct stat there{};
  if (!file.valid() && errno == EACCES && ::lstat(path.c_str(), &there) == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "policies.checkpoint.directory ", directory, " is that of a schedule of user ", there.st_uid,
        "; give every optimizer, as every run, a directory of its own, or remove ", path, " where that one is over"));
  }
  if (file.valid()) ::fchmod(file.get(), 0600);  // whoever has made it
  if (file.valid() && ::flock(file.get(), lock | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    std::array<char, 512> owner{};
    const ssize_t bytes = ::pread(file.get(), owner.data(), owner.size(), 0);
    return absl::FailedPreconditionError(
        absl::StrCat("policies.checkpoint.directory ", directory, " is that of the schedule of ",
                     bytes > 0 ? absl::string_view(owner.data(), static_cast<size_t>(bytes))
                               : absl::string_view("another optimizer"),
                     "; give every optimizer, as every run, a directory of its own"));
  }
  return file;
}

}  // namespace

absl::StatusOr<std::shared_ptr<DirectoryClaim>> DirectoryClaim::Take(const std::string& directory,
                                                                     const std::string& optimizer,
                                                                     std::optional<uint32_t> rank) {
  const std::string path = absl::StrCat(directory, "/", kClaimFile);
  memory::FileDescriptor shared;
  if (rank) {
    absl::StatusOr<memory::FileDescriptor> locked = Lock(directory, path, LOCK_SH);
    if (!locked.ok()) return locked.status();
    shared = *std::move(locked);
  }
  absl::StatusOr<memory::FileDescriptor> file =
      rank ? Lock(directory, absl::StrCat(path, ".", *rank), LOCK_EX) : Lock(directory, path, LOCK_EX);
  if (!file.ok()) return file.status();
  const std::string owner =
      absl::StrCat("optimizer \"", optimizer, "\" in superoffloadd ", ::getpid(), " on ", HostName());
  for (const memory::FileDescriptor* named : {&*file, &shared}) {
    if (named->valid() && ::ftruncate(named->get(), 0) == 0) {
      (void)!::pwrite(named->get(), owner.data(), owner.size(), 0);
    }
  }
  return std::shared_ptr<DirectoryClaim>(new DirectoryClaim(*std::move(file), std::move(shared)));
}

}  // namespace superoffload::checkpoint
