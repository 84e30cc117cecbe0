#include "server/checkpoint/act_as.h"

#include <grp.h>
#include <pwd.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/memory/thread.h"

namespace superoffload::checkpoint {
namespace {

constexpr gid_t kNoGroup = 65534;

// The user's groups, the primary one first; none of the machine's when the machine does not know the user.
std::vector<gid_t> GroupsOf(uid_t uid) {
  std::array<char, 16384> buffer;
  passwd entry;
  passwd* found = nullptr;
  ::getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found);
  if (found == nullptr) return {kNoGroup};
  std::vector<gid_t> groups(64);
  int count = static_cast<int>(groups.size());
  if (::getgrouplist(found->pw_name, found->pw_gid, groups.data(), &count) < 0) {
    groups.resize(static_cast<size_t>(count));
    if (::getgrouplist(found->pw_name, found->pw_gid, groups.data(), &count) < 0) return {found->pw_gid};
  }
  groups.resize(static_cast<size_t>(count));
  return groups;
}

}  // namespace

absl::Status ActAs(uid_t uid) {
  if (uid == ::geteuid()) return absl::OkStatus();
  constexpr auto kNone = static_cast<uid_t>(-1);  // changes nothing, and returns what is
  const std::vector<gid_t> groups = GroupsOf(uid);
  const gid_t gid = groups.front();
  // The system call, unlike the library's function, is of this thread only.
  const bool groups_changed = ::syscall(SYS_setgroups, groups.size(), groups.data()) == 0;
  ::setfsgid(gid);
  ::setfsuid(uid);
  if (groups_changed && static_cast<gid_t>(::setfsgid(kNone)) == gid && static_cast<uid_t>(::setfsuid(kNone)) == uid) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat("the daemon runs as uid ", ::geteuid(), " and cannot use files as uid ", uid,
                   "; run it with CAP_SETUID and CAP_SETGID, or as that user, to take checkpoints of its optimizers"));
}

absl::Status RunAs(uid_t uid, const std::function<absl::Status()>& work) {
  absl::Status status;
  absl::StatusOr<std::thread> thread = memory::StartThread("so-files", [&] {
    status = ActAs(uid);
    if (status.ok()) status = work();
  });
  if (!thread.ok()) return thread.status();
  thread->join();
  return status;
}

}  // namespace superoffload::checkpoint
