#include "server/memory/memory_limit.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace superoffload::memory {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// A system's proc and sys, as far as they are described.
class MemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ =
        ::testing::TempDir() + "memory_limit_test_" + ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = root_ + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << "\n";
  }

  std::string root_;
};

TEST_F(MemoryLimitTest, IsTheLeastOfTheGroupAndOfThoseAboveIt) {
  Write("/proc/self/cgroup", "0::/system.slice/superoffloadd.service");
  Write("/sys/fs/cgroup/system.slice/superoffloadd.service/memory.max", "4000000");
  Write("/sys/fs/cgroup/system.slice/superoffloadd.service/memory.high", "max");
  EXPECT_EQ(ControlGroupLimitBytes(root_), 4000000u);
  Write("/sys/fs/cgroup/system.slice/superoffloadd.service/memory.high", "3000000");
  EXPECT_EQ(ControlGroupLimitBytes(root_), 3000000u);
  Write("/sys/fs/cgroup/system.slice/memory.max", "2000000");
  EXPECT_EQ(ControlGroupLimitBytes(root_), 2000000u);
}

TEST_F(MemoryLimitTest, IsThatOfTheMountWhereTheGroupItselfIsNotSeen) {
  Write("/proc/self/cgroup", "0::/kubepods/pod7/container");
  Write("/sys/fs/cgroup/memory.max", "5000000");
  EXPECT_EQ(ControlGroupLimitBytes(root_), 5000000u);
}

TEST_F(MemoryLimitTest, IsFoundInVersionOneAsWell) {
  Write("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:hugetlb,memory:/a/b\n1:name=systemd:/a\n0::/");
  Write("/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712");
  Write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "6000000");
  EXPECT_EQ(ControlGroupLimitBytes(root_), 6000000u);
}

TEST_F(MemoryLimitTest, IsNoneWithoutControlGroups) {
  EXPECT_EQ(ControlGroupLimitBytes(root_), kUnlimited);
  Write("/proc/self/cgroup", "0::/\n\nnonsense");
  Write("/sys/fs/cgroup/memory.max", "max");
  EXPECT_EQ(ControlGroupLimitBytes(root_), kUnlimited);
}

TEST_F(MemoryLimitTest, ABudgetIsNeverBeyondTheLimit) {
  EXPECT_EQ(BudgetBytes(0, 1000), 800u);
  EXPECT_EQ(BudgetBytes(900, 1000), 900u);
  EXPECT_EQ(BudgetBytes(5000, 1000), 1000u);
}

}  // namespace
}  // namespace superoffload::memory
