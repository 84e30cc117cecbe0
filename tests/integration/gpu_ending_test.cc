// A trainer or a daemon that is killed while the trainer's GPU copies: what comes late lands before the next attachment
// has the memory.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <thread>

#include "tests/support/gpu_trainer.h"

namespace superoffload {
namespace {

// In all bytes of the slots: what the trainer leaves there, and the next one.
constexpr std::byte kBefore{1}, kAfter{2};
constexpr std::chrono::milliseconds kBetweenCalls{10}, kCopyBegins{200};

class GpuEndingTest : public GpuTest {
 protected:
  std::span<std::byte> Slots() const { return MemoryOf(attachment_->handle(), SUPEROFFLOAD_REGION_GRADIENTS); }
};

// Not a test of its own: what the next one kills while a copy of zeros into its slots is under way.
TEST_F(GpuEndingTest, DISABLED_CopiesUntilItIsKilled) {
  client_ = *Client::Connect(std::getenv("GPU_TEST_ENDPOINT"));
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_NEVER, kBFloat16));
  ASSERT_TRUE(AttachGpu(SUPEROFFLOAD_MOVER_TRAINER) && status_.ok()) << status_;
  ASSERT_TRUE(attachment_->PushParameters().ok());
  std::ranges::fill(Slots(), kBefore);
  const auto unfinished = OfDriver<int()>("fakeCudaUnfinishedCopies");
  ASSERT_EQ(unfinished(), 0);
  ::setenv("FAKE_CUDA_SLOW", "DtoH=1000000000", 1);
  ASSERT_TRUE(HandOverNothing().ok());
  while (unfinished() == 0) std::this_thread::sleep_for(kBetweenCalls);
  ASSERT_EQ(::write(std::atoi(std::getenv("GPU_TEST_SAYS")), "c", 1), 1);
  while (true) ::pause();
}

TEST_F(GpuEndingTest, TheNextAttachmentHasTheSlotsOnceNoLateCopyLandsThere) {
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_NEVER, kBFloat16));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_TRAINER)) GTEST_SKIP() << status_;
  if (!IsFake()) GTEST_SKIP() << "a real GPU does not copy late when told to";
  attachment_.reset();
  ASSERT_TRUE(client_->DeleteOptimizer("exact").ok());
  int says[2];
  ASSERT_EQ(::pipe(says), 0);
  ::setenv("GPU_TEST_ENDPOINT", daemon_->endpoint().c_str(), 1);
  ::setenv("GPU_TEST_SAYS", std::to_string(says[1]).c_str(), 1);
  ::setenv("FAKE_CUDA_OUTLIVES", "3000", 1);
  std::string words[] = {"/proc/self/exe", "--gtest_also_run_disabled_tests",
                         "--gtest_filter=*DISABLED_CopiesUntilItIsKilled"};
  char* arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
  pid_t trainer = 0;
  ASSERT_EQ(::posix_spawn(&trainer, arguments[0], nullptr, nullptr, arguments, environ), 0);
  ::unsetenv("FAKE_CUDA_OUTLIVES");
  ::close(says[1]);
  char said = 0;
  ASSERT_EQ(::read(says[0], &said, 1), 1) << "it ended by itself";
  ::close(says[0]);
  ::kill(trainer, SIGKILL);
  v1::AttachOptimizerRequest request;
  request.set_name("exact");
  request.set_sync(v1::SYNC_PUSH);
  absl::StatusOr<std::unique_ptr<Attachment>> next = client_->Attach(request);
  while (next.status().code() == absl::StatusCode::kFailedPrecondition) {  // it is ending
    std::this_thread::sleep_for(kBetweenCalls);
    next = client_->Attach(request);
  }
  ASSERT_TRUE(next.ok()) << next.status();
  attachment_ = *std::move(next);
  EXPECT_NE(std::ranges::count(Slots(), kBefore), 0);
  EXPECT_NE(std::ranges::count(Slots(), std::byte{}), 0) << "the copy has landed before";
  std::ranges::fill(Slots(), kAfter);
  int status = 0;
  ASSERT_EQ(::waitpid(trainer, &status, 0), trainer);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_EQ(std::ranges::count(Slots(), kAfter), std::ssize(Slots())) << "a copy of the dead landed in them";
}

// Gradients, zeros, are on their way to where the successor publishes the parameters.
TEST_F(GpuEndingTest, WhatIsPublishedInPlaceOutlivesLateGradientsOfADeadDaemons) {
  daemon_ = std::make_unique<test::DaemonProcess>(std::vector<std::string>{"--worker_threads=2", "--keeper"});
  client_ = *Client::Connect(daemon_->endpoint());
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_NEVER, kBFloat16, /*log_slots=*/0, /*gradient_slots=*/1,
                                 /*logged=*/0, /*in_place=*/true));
  FillParameters(kBefore);
  ASSERT_TRUE(attachment_->PushParameters().ok());
  if (!AttachGpu(SUPEROFFLOAD_MOVER_TRAINER)) GTEST_SKIP() << status_;
  if (!IsFake()) GTEST_SKIP() << "a real GPU does not copy late when told to";
  ASSERT_EQ(superoffload_gpu_copy(attachment_->handle(), SUPEROFFLOAD_TO_GPU, 0), 0);
  ::setenv("FAKE_CUDA_SLOW", "DtoH=1500000", 1);
  ASSERT_TRUE(HandOverNothing().ok());
  std::this_thread::sleep_for(kCopyBegins);
  ::unsetenv("FAKE_CUDA_SLOW");  // for the copies after this one
  ::kill(*daemon_->kept_daemon(), SIGKILL);
  ASSERT_TRUE(attachment_->WaitNorm().ok()) << "of the successor, to which the step is submitted again";
  Abandon();
  ASSERT_EQ(superoffload_gpu_copy(attachment_->handle(), SUPEROFFLOAD_FROM_GPU, 0), 0);
  ExpectParameters(kBefore);
}

}  // namespace
}  // namespace superoffload
