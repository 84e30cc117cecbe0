#include "server/checkpoint/act_as.h"

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <pwd.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

namespace superoffload::checkpoint {
namespace {

constexpr uid_t kOther = 54321;  // nobody has it

// This thread's.
void DropCapability(unsigned capability) {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  ASSERT_EQ(::syscall(SYS_capget, &header, data), 0);
  data[CAP_TO_INDEX(capability)].effective &= ~CAP_TO_MASK(capability);
  ASSERT_EQ(::syscall(SYS_capset, &header, data), 0);
}

class ActAsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root acts as others";
  }
};

TEST_F(ActAsTest, TheThreadHasTheUsersRightsAndNoOthers) {
  EXPECT_TRUE(RunAs(kOther, [] {
                EXPECT_EQ(::setfsuid(static_cast<uid_t>(-1)), static_cast<int>(kOther));
                EXPECT_NE(::setfsgid(static_cast<gid_t>(-1)), 0);
                gid_t nobody = 0;
                EXPECT_EQ(::getgroups(1, &nobody), 1);
                EXPECT_EQ(nobody, 65534u);
                return absl::OkStatus();
              }).ok());
  EXPECT_EQ(::setfsuid(static_cast<uid_t>(-1)), 0) << "other threads keep theirs";
}

// A project's directory is writable to its group.
TEST_F(ActAsTest, TheThreadHasTheGroupsOfTheUsersProjects) {
  uid_t member = 0;
  gid_t project = 0;
  ::setgrent();
  for (const group* entry = ::getgrent(); entry != nullptr && member == 0; entry = ::getgrent()) {
    const passwd* const user = entry->gr_mem[0] == nullptr ? nullptr : ::getpwnam(entry->gr_mem[0]);
    if (user == nullptr || user->pw_uid == 0 || user->pw_gid == entry->gr_gid) continue;
    member = user->pw_uid;
    project = entry->gr_gid;
  }
  ::endgrent();
  if (member == 0) GTEST_SKIP() << "no user here has a further group";
  EXPECT_TRUE(RunAs(member, [project] {
                std::vector<gid_t> groups(1024);
                groups.resize(static_cast<size_t>(::getgroups(1024, groups.data())));
                EXPECT_THAT(groups, ::testing::Contains(project));
                return absl::OkStatus();
              }).ok());
}

// With root's groups a user's checkpoint could read what only they may.
TEST_F(ActAsTest, ADaemonThatKeepsItsGroupsOrItsUserDoesNotGoOn) {
  for (const unsigned capability : {CAP_SETUID, CAP_SETGID}) {
    absl::Status status;
    std::thread([&] {
      DropCapability(capability);
      status = ActAs(kOther);
    }).join();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << capability;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("CAP_SETGID"));
  }
}

}  // namespace
}  // namespace superoffload::checkpoint
