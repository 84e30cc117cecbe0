#include "server/optimizer/process.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

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

TEST(ProcessTest, OneThatEndsIsAwaited) {
  int gate[2];
  ASSERT_EQ(::pipe(gate), 0);
  const pid_t child = ::fork();
  if (child == 0) {  // ends but for a thread, as a killed one does whose files take their time to close
    std::thread([&gate] {
      char byte;
      (void)!::read(gate[0], &byte, 1);
      ::_exit(0);
    }).detach();
    ::syscall(SYS_exit, 0);
  }
  const Process process = FindProcess(child);
  using std::chrono::milliseconds;
  while (AwaitEnd(process, milliseconds(1))) std::this_thread::sleep_for(milliseconds(1));  // it has not begun to end
  EXPECT_TRUE(MayRun(process));
  ASSERT_EQ(::write(gate[1], "x", 1), 1);
  EXPECT_TRUE(AwaitEnd(process, std::chrono::minutes(1)));
  EXPECT_FALSE(MayRun(process));
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(AwaitEnd(process, std::chrono::minutes(1)));
  ::close(gate[0]);
  ::close(gate[1]);
}

TEST(ProcessTest, OneThatRunsIsNotAwaited) {
  EXPECT_TRUE(AwaitEnd(FindProcess(::getpid()), std::chrono::hours(1)));
  EXPECT_TRUE(AwaitEnd(Process{}, std::chrono::hours(1))) << "it is not known";
}

TEST(ProcessTest, AnUnknownOneMayRun) { EXPECT_TRUE(MayRun(Process{})); }

}  // namespace
}  // namespace superoffload::optimizer
