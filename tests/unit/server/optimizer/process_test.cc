#include "server/optimizer/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace superoffload::optimizer {
namespace {

TEST(ProcessTest, ThisOneRuns) {
  const Process self = FindProcess(::getpid());
  EXPECT_EQ(self.pid, ::getpid());
  EXPECT_GT(self.start_time, 0u);
  EXPECT_TRUE(MayRun(self));
  EXPECT_EQ(FindProcess(::getpid()), self);
}

TEST(ProcessTest, ALaterOneOfTheSameNumberIsAnother) {
  Process earlier = FindProcess(::getpid());
  --earlier.start_time;
  EXPECT_FALSE(MayRun(earlier));
}

TEST(ProcessTest, OneThatHasEndedDoesNotRunEvenBeforeItIsWaitedFor) {
  int gate[2];
  ASSERT_EQ(::pipe(gate), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    (void)!::read(gate[0], &byte, 1);
    ::_exit(0);
  }
  const Process process = FindProcess(child);
  EXPECT_TRUE(MayRun(process));
  ASSERT_EQ(::write(gate[1], "x", 1), 1);
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(MayRun(process));
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(MayRun(process));
  ::close(gate[0]);
  ::close(gate[1]);
}

TEST(ProcessTest, AnUnknownOneMayRun) { EXPECT_TRUE(MayRun(Process{})); }

}  // namespace
}  // namespace superoffload::optimizer
