#include "server/checkpoint/act_as.h"

#include <pwd.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "absl/strings/str_cat.h"

namespace superoffload::checkpoint {
namespace {

constexpr gid_t kNoGroup = 65534;

gid_t PrimaryGroup(uid_t uid) {
  std::array<char, 16384> buffer;
  passwd entry;
  passwd* found = nullptr;
  ::getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found);
  return found == nullptr ? kNoGroup : found->pw_gid;
}

}  // namespace

absl::Status ActAs(uid_t uid) {
  if (uid == ::geteuid()) return absl::OkStatus();
  // The system call, unlike the library's function, is of this thread only.
  ::syscall(SYS_setgroups, 0, nullptr);
  ::setfsgid(PrimaryGroup(uid));
  ::setfsuid(uid);
  if (static_cast<uid_t>(::setfsuid(static_cast<uid_t>(-1))) == uid) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("the daemon runs as uid ", ::geteuid(), " and cannot use files as uid ", uid,
                   "; run it as root or as that user to take checkpoints of its optimizers"));
}

absl::Status RunAs(uid_t uid, const std::function<absl::Status()>& work) {
  absl::Status status;
  std::thread([&] {
    status = ActAs(uid);
    if (status.ok()) status = work();
  }).join();
  return status;
}

}  // namespace superoffload::checkpoint
