// Whole steps that XLA calls for on a GPU are exact, and end in the call, whatever becomes of the daemon. With the fake
// driver, or on a real GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/xla_step_trainer.h"

namespace superoffload {
namespace {

using ::testing::HasSubstr;

constexpr int kInsideSteps = 12;

const XlaCase kInsideCases[] = {
    {"Daemon", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16},
    {"TrainerSlowUp", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_NEVER, kFloat32, "HtoD=1000"},
    {"Direct", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ADAPTIVE, kFloat16},
};

class StepInsideTest : public GpuXlaTest {
 protected:
  ~StepInsideTest() override {
    trainer_.reset();
    attachment_.reset();
  }

  void Prepare(const XlaCase& c) {
    ASSERT_NO_FATAL_FAILURE(GpuXlaTest::Prepare(c));
    if (IsSkipped()) return;
    trainer_ = std::make_unique<StepInsideTrainer>(attachment_.get());
  }
  void Prepare() {
    ASSERT_NO_FATAL_FAILURE(Prepare(kInsideCases[1]));
    if (IsSkipped()) return;
    ASSERT_TRUE(trainer_->PushParameters().ok());
  }

  // With gradients of 0.
  absl::Status Step(double gradient_scale = 1, double max_grad_norm = 0) {
    absl::Status status = trainer_->BeginStep(1);
    const int count = attachment_->optimizer().parameters_size();
    for (int i = 0; status.ok() && i < count; ++i) status = trainer_->GradientReady(static_cast<size_t>(i));
    return status.ok() ? trainer_->EndStep(gradient_scale, max_grad_norm) : status;
  }
  std::future<absl::Status> StepInAnotherThread() {
    return std::async(std::launch::async, [this] {
      trainer_->MakeCurrent();
      return Step();
    });
  }
  void ExpectCommits(uint64_t steps) {
    const absl::Status status = Step();
    ASSERT_TRUE(status.ok()) << status;
    const absl::StatusOr<superoffload_verdict> verdict = trainer_->WaitStep();
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    EXPECT_EQ(verdict->committed_steps, steps);
  }

  std::unique_ptr<StepInsideTrainer> trainer_;
};

class StepInsideExactnessTest : public StepInsideTest, public ::testing::WithParamInterface<XlaCase> {};

TEST_P(StepInsideExactnessTest, EqualsTheScalarReferenceInEveryStep) {
  ASSERT_NO_FATAL_FAILURE(Prepare(GetParam()));
  if (IsSkipped()) return;
  test::ExactTraining(trainer_.get(), test::Spec(GetParam().dtypes), GetParam().dtypes, kXlaSeed).Train(kInsideSteps);
  trainer_.reset();
  attachment_.reset();
  EXPECT_EQ(daemon_->Stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, StepInsideExactnessTest, ::testing::ValuesIn(kInsideCases),
                         [](const auto& info) { return info.param.name; });

TEST_F(StepInsideTest, TheDaemonsDeathEndsTheCallWithTheRemedy) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(ExpectCommits(1));
  ::kill(daemon_->pid(), SIGSTOP);
  std::future<absl::Status> ended = StepInAnotherThread();
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  ::kill(daemon_->pid(), SIGKILL);
  EXPECT_THAT(std::string(ended.get().message()), HasSubstr("the step inside jit is lost: pull_params() attaches"));
  EXPECT_THAT(std::string(Step().message()), HasSubstr("pull_params() attaches to the daemon's successor"));
  superoffload_open_step_state step;
  ASSERT_EQ(superoffload_look(trainer_->submitter(), &step, nullptr), 0);
  EXPECT_TRUE(step.lost);
  EXPECT_FALSE(step.begun);
}

TEST_F(StepInsideTest, NoStreamIsCaptured) {
  for (const char* handler : {"step", "count"}) {
    EXPECT_EQ(test::XlaCall::Traits(handler), 0u) << handler << " may not go into a command buffer";
  }
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  const auto begin = OfDriver<int(kernels::CudaStream, int)>("cuStreamBeginCapture_v2");
  const auto end = OfDriver<int(kernels::CudaStream, void**)>("cuStreamEndCapture");
  Tensor::Require(begin(trainer_->stream(), 0));
  EXPECT_THAT(trainer_->Step({}, 0), HasSubstr("captured into a CUDA graph"));
  EXPECT_THAT(trainer_->Count(), HasSubstr("captured into a CUDA graph"));
  void* graph = nullptr;
  Tensor::Require(end(trainer_->stream(), &graph));
  ASSERT_NO_FATAL_FAILURE(ExpectCommits(1));
}

TEST_F(StepInsideTest, AStepInAnotherOrderThanItsCountIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(ExpectCommits(1));
  ASSERT_EQ(trainer_->Count(), "");
  ASSERT_TRUE(trainer_->EndStep(1, 0).ok()) << "it counts anew";
  EXPECT_THAT(trainer_->Step({}, 0), HasSubstr("in another order than in the program")) << "with what was the count";
  ASSERT_NO_FATAL_FAILURE(ExpectCommits(3));
}

TEST_F(StepInsideTest, AfterAnErrorNoStepIsOpen) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  EXPECT_THAT(std::string(Step(0, 0).message()), HasSubstr("gradient scale is 0")) << "before it begins";
  EXPECT_THAT(std::string(Step(1, -1).message()), HasSubstr("max_grad_norm is -1")) << "with all gradients submitted";
  ASSERT_NO_FATAL_FAILURE(ExpectCommits(1));
}

// Their memory is XLA's again when the call has failed, too.
TEST_F(StepInsideTest, ACallThatFailsReturnsWhenGradientsAreNoLongerRead) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  const auto issue = OfDriver<int(void*, void (*)(void*), void*)>("fakeCudaIssue");
  if (issue == nullptr) GTEST_SKIP() << "a real GPU is not late when told to";
  ASSERT_NO_FATAL_FAILURE(ExpectCommits(1));
  std::promise<void> gate;
  issue(
      reinterpret_cast<void*>(attachment_->gpu_report().pack_stream),
      [](void* gate) { static_cast<std::promise<void>*>(gate)->get_future().wait(); }, &gate);
  std::future<absl::Status> ended = StepInAnotherThread();
  ::kill(daemon_->pid(), SIGKILL);
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(500)), std::future_status::timeout);
  gate.set_value();
  EXPECT_THAT(std::string(ended.get().message()), HasSubstr("the daemon is gone"));
}

}  // namespace
}  // namespace superoffload
