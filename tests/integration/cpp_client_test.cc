// The C++ client against a real daemon: what it refuses by itself, what the daemon refuses, and what a step returns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "superoffload/client.hpp"
#include "superoffload/v1/step_ring.h"
#include "tests/support/daemon_process.h"

namespace superoffload {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr size_t kLarge = 0, kFirstSmall = 1, kSecondSmall = 2;

// One parameter of several buckets, and two that share one.
v1::CreateOptimizerRequest Plan(const std::string& name) {
  v1::CreateOptimizerRequest request;
  request.set_name(name);
  request.set_bucket_bytes(4096);
  request.set_algorithm("adamw");
  v1::ParameterGroup* group = request.add_groups();
  SetScalar(group, "lr", 0.1);
  SetScalar(group, "weight_decay", 0);
  for (uint64_t elements : {5000, 100, 200}) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name("w" + std::to_string(elements));
    parameter->add_shape(elements);
    parameter->set_dtype(v1::DATA_TYPE_FLOAT32);
  }
  return request;
}

void ExpectError(const absl::Status& status, absl::StatusCode code, const char* part) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(part));
}

class CppClientTest : public ::testing::Test {
 protected:
  CppClientTest() : client_(std::move(*Client::Connect(daemon_.endpoint()))) {
    EXPECT_TRUE(client_->CreateOptimizer(Plan("o")).ok());
    trainer_ = Attach(v1::SYNC_PUSH);
    EXPECT_TRUE(trainer_->PushParameters().ok());  // zeros
  }

  std::unique_ptr<Attachment> Attach(v1::Sync sync = v1::SYNC_PULL) {
    v1::AttachOptimizerRequest request;
    request.set_name("o");
    request.set_sync(sync);
    auto attachment = client_->Attach(request);
    EXPECT_TRUE(attachment.ok()) << attachment.status();
    return attachment.ok() ? *std::move(attachment) : nullptr;
  }

  superoffload_verdict Step(float gradient) {
    EXPECT_TRUE(trainer_->BeginStep().ok());
    for (size_t i : {kSecondSmall, kLarge, kFirstSmall}) {
      std::ranges::fill(trainer_->Gradient<float>(i), gradient);
      EXPECT_TRUE(trainer_->GradientReady(i).ok());
    }
    EXPECT_TRUE(trainer_->EndStep().ok());
    auto verdict = trainer_->WaitStep();
    EXPECT_TRUE(verdict.ok()) << verdict.status();
    return *verdict;
  }

  test::DaemonProcess daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Attachment> trainer_;
};

TEST_F(CppClientTest, StepsMoveParametersAgainstTheirGradients) {
  const superoffload_verdict verdict = Step(1);
  EXPECT_EQ(verdict.committed_steps, 1u);
  EXPECT_DOUBLE_EQ(verdict.global_norm, std::sqrt(5300));
  for (size_t i : {kLarge, kFirstSmall, kSecondSmall}) {
    const auto values = trainer_->Parameter<float>(i);
    EXPECT_THAT(std::vector<float>(values.begin(), values.end()), Each(::testing::FloatNear(-0.1f, 1e-6f)));
  }
}

TEST_F(CppClientTest, TheNormIsKnownBeforeTheEnd) {
  ASSERT_TRUE(trainer_->BeginStep().ok());
  for (size_t i : {kLarge, kFirstSmall, kSecondSmall}) {
    std::ranges::fill(trainer_->Gradient<float>(i), 2.0f);
    ASSERT_TRUE(trainer_->GradientReady(i).ok());
  }
  EXPECT_DOUBLE_EQ(*trainer_->WaitNorm(0.5), std::sqrt(5300));
  ASSERT_TRUE(trainer_->AbandonStep().ok());
  EXPECT_EQ(trainer_->WaitStep()->kind, SUPEROFFLOAD_VERDICT_SKIP_ABANDONED);
  EXPECT_THAT(trainer_->Parameter<float>(kFirstSmall)[0], 0);
  EXPECT_EQ(Step(1).committed_steps, 1u);
}

TEST_F(CppClientTest, MisuseInsideAStepIsNamedAndTheStepGoesOn) {
  ExpectError(trainer_->EndStep(), absl::StatusCode::kFailedPrecondition, "no step is open");
  ASSERT_TRUE(trainer_->BeginStep().ok());
  ExpectError(trainer_->BeginStep(), absl::StatusCode::kFailedPrecondition, "open");
  ExpectError(trainer_->GradientReady(3), absl::StatusCode::kInvalidArgument, "3 parameters");
  ASSERT_TRUE(trainer_->GradientReady(kLarge).ok());
  ExpectError(trainer_->GradientReady(kLarge), absl::StatusCode::kFailedPrecondition, "w5000 came twice");
  ExpectError(trainer_->EndStep(), absl::StatusCode::kFailedPrecondition, "missing");
  ASSERT_TRUE(trainer_->GradientReady(kFirstSmall).ok());
  ASSERT_TRUE(trainer_->GradientReady(kSecondSmall).ok());
  ExpectError(trainer_->EndStep(0), absl::StatusCode::kInvalidArgument, "scale");
  ASSERT_TRUE(trainer_->EndStep().ok());
  EXPECT_TRUE(trainer_->WaitStep().ok());
}

TEST_F(CppClientTest, PushedParametersAreTheMasters) {
  std::ranges::fill(trainer_->Parameter<float>(kFirstSmall), 7.0f);
  ASSERT_TRUE(trainer_->PushParameters().ok());
  std::ranges::fill(trainer_->Parameter<float>(kFirstSmall), 9.0f);
  ASSERT_TRUE(trainer_->PullParameters().ok());
  EXPECT_EQ(trainer_->Parameter<float>(kFirstSmall)[99], 7.0f);
}

TEST_F(CppClientTest, AnOptimizerOutlivesItsTrainer) {
  Step(1);
  trainer_.reset();
  trainer_ = Attach();
  ASSERT_NE(trainer_, nullptr);
  EXPECT_EQ(trainer_->optimizer().committed_steps(), 1u);
  EXPECT_NEAR(trainer_->Parameter<float>(kLarge)[4999], -0.1f, 1e-6f);
  EXPECT_EQ(Step(1).committed_steps, 2u);
}

TEST_F(CppClientTest, RefusalsCarryTheDaemonsCodeAndSentence) {
  ExpectError(client_->CreateOptimizer(Plan("o")).status(), absl::StatusCode::kAlreadyExists, "\"o\"");
  ExpectError(client_->GetOptimizer("p").status(), absl::StatusCode::kNotFound, "\"p\"");
  ExpectError(client_->DeleteOptimizer("o"), absl::StatusCode::kFailedPrecondition, "attached");
  v1::AttachOptimizerRequest second;
  second.set_name("o");
  second.set_sync(v1::SYNC_PULL);
  ExpectError(client_->Attach(second).status(), absl::StatusCode::kFailedPrecondition, "attached");
  ASSERT_TRUE(trainer_->BeginStep().ok());
  while (client_->GetOptimizer("o")->step() == 0) std::this_thread::yield();
  ExpectError(client_->SettleOptimizer("o").status(), absl::StatusCode::kFailedPrecondition, "step 1 is open");
}

TEST_F(CppClientTest, ParametersThatDifferFromTheMastersAreRefused) {
  trainer_.reset();
  v1::AttachOptimizerRequest request;
  request.set_name("o");
  request.set_sync(v1::SYNC_CHECK);
  for (int i = 0; i < 3; ++i) request.add_parameter_crc32(12345);
  ExpectError(client_->Attach(request).status(), absl::StatusCode::kFailedPrecondition, "w5000");
}

TEST_F(CppClientTest, WatchersSeeEveryStep) {
  std::vector<uint64_t> steps;
  std::atomic<bool> seen{false};
  std::thread stepping([&] {
    while (!seen) Step(1);
  });
  EXPECT_TRUE(client_
                  ->WatchSteps("o",
                               [&](const v1::StepReport& report) {
                                 steps.push_back(report.step());
                                 return steps.size() < 3;
                               })
                  .ok());
  seen = true;
  stepping.join();
  EXPECT_EQ(steps[1], steps[0] + 1);
  EXPECT_EQ(steps[2], steps[1] + 1);
}

TEST_F(CppClientTest, ADaemonThatStopsEndsTheAttachment) {
  ASSERT_TRUE(trainer_->BeginStep().ok());
  EXPECT_EQ(daemon_.Stop(), 0);
  ::setenv("SUPEROFFLOAD_SOCKET_SECONDS", "0.1", 1);
  absl::Status status;
  for (int i = 0; i < 3 && status.ok(); ++i) status = trainer_->GradientReady(i);
  if (status.ok()) status = trainer_->EndStep();
  if (status.ok()) status = trainer_->WaitStep().status();
  ::unsetenv("SUPEROFFLOAD_SOCKET_SECONDS");
  ExpectError(status, absl::StatusCode::kUnavailable, "has stopped, and no other has come");
}

// What a step of the trainer is made of, to the last bit the same whichever of it finds the daemon dead.
class CppReplayTest : public ::testing::Test {
 protected:
  // Parameters after some steps, before part `kill_before` of each of which the daemon is killed; none: it lives.
  static std::vector<float> Train(std::optional<int> kill_before) {
    test::DaemonProcess daemon({"--keeper"});
    const std::unique_ptr<Client> client = *Client::Connect(daemon.endpoint());
    EXPECT_TRUE(client->CreateOptimizer(Plan("o")).ok());
    v1::AttachOptimizerRequest request;
    request.set_name("o");
    request.set_sync(v1::SYNC_PUSH);
    const std::unique_ptr<Attachment> trainer = *client->Attach(request);
    EXPECT_TRUE(trainer->PushParameters().ok());  // zeros
    for (int step = 1; step <= 3; ++step) {
      int part = 0;
      const auto next = [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << "part " << part - 1 << " of step " << step << ": " << status;
        if (part++ == kill_before) Kill(daemon);
      };
      next(absl::OkStatus());
      v1::ParameterGroup group;
      SetScalar(&group, "lr", 0.1 / step);
      next(trainer->SetGroup(0, group));
      next(trainer->BeginStep());
      for (const size_t i : {kSecondSmall, kLarge}) {
        const auto gradient = trainer->Gradient<float>(i);
        for (size_t j = 0; j < gradient.size(); ++j) gradient[j] = static_cast<float>(j % 7) - 3.0f / step;
        next(trainer->GradientReady(i));
      }
      next(trainer->ParameterAbsent(kFirstSmall));
      next(trainer->WaitNorm().status());
      next(trainer->EndStep(1, 0.5));
      const auto verdict = trainer->WaitStep();
      next(verdict.status());
      EXPECT_EQ(verdict->committed_steps, static_cast<uint64_t>(step));
    }
    std::vector<float> all;
    for (const size_t i : {kLarge, kFirstSmall, kSecondSmall}) {
      const auto values = trainer->Parameter<float>(i);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

 private:
  static void Kill(const test::DaemonProcess& daemon) {
    std::optional<pid_t> victim;
    while (!(victim = daemon.kept_daemon())) std::this_thread::yield();
    ::kill(*victim, SIGKILL);
    while (daemon.kept_daemon() == victim) std::this_thread::yield();
  }
};

TEST_F(CppReplayTest, ADaemonThatDiesAnywhereInAStepChangesNoBit) {
  const std::vector<float> undisturbed = Train(std::nullopt);
  EXPECT_NE(undisturbed.front(), 0);
  for (int part = 0; part <= 8; ++part) EXPECT_EQ(Train(part), undisturbed) << "killed before part " << part;
}

TEST(ClientTest, NobodyListening) {
  ExpectError(Client::Connect("unix:/nonexistent/control.sock").status(), absl::StatusCode::kUnavailable,
              "/nonexistent/control.sock");
}

}  // namespace
}  // namespace superoffload
