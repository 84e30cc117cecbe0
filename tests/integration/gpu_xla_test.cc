// What XLA calls on a GPU is exact, whoever copies and however late the GPU's streams are, and though XLA uses its
// memory for something else after each call. With the fake driver, or on a real GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "superoffload/v1/step_ring.h"
#include "tests/support/xla_gpu_trainer.h"

namespace superoffload {
namespace {

using ::testing::HasSubstr;

constexpr int kXlaSteps = 24;

const XlaCase kXlaCases[] = {
    {"Daemon", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kBFloat16},
    {"Trainer", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kFloat32},
    {"TrainerSlowUp", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_NEVER, kBFloat16, "HtoD=1000"},
    {"Direct", SUPEROFFLOAD_MOVER_DIRECT, v1::SPECULATION_ADAPTIVE, kFloat16},
    {"Streamed", SUPEROFFLOAD_MOVER_TRAINER, v1::SPECULATION_ALWAYS, kBFloat16, "HtoD=1000", /*stream_slots=*/2},
    {"StreamedByTheDaemon", SUPEROFFLOAD_MOVER_DAEMON, v1::SPECULATION_ALWAYS, kFloat32, nullptr, /*stream_slots=*/1},
};

class GpuXlaExactnessTest : public GpuXlaTest, public ::testing::WithParamInterface<XlaCase> {};

TEST_P(GpuXlaExactnessTest, EqualsTheScalarReferenceInEveryStep) {
  ASSERT_NO_FATAL_FAILURE(Prepare(GetParam()));
  if (IsSkipped()) return;
  {
    const XlaCase& c = GetParam();
    XlaGpuTrainer trainer(attachment_.get(), c.stream_slots > 0);
    test::ExactTraining(&trainer, SpecOf(c.dtypes, c.stream_slots), c.dtypes, kXlaSeed).Train(kXlaSteps);
  }
  attachment_.reset();
  EXPECT_EQ(daemon_->Stop(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, GpuXlaExactnessTest, ::testing::ValuesIn(kXlaCases),
                         [](const auto& info) { return info.param.name; });

const XlaCase& kUsual = kXlaCases[1];

// With parameters that are not zero, and gradients of 0.1.
class GpuXlaStepTest : public GpuXlaTest {
 protected:
  void Prepare() {
    ASSERT_NO_FATAL_FAILURE(GpuXlaTest::Prepare(kUsual));
    if (IsSkipped()) return;
    trainer_ = std::make_unique<XlaGpuTrainer>(attachment_.get());
    for (size_t i = 0; i < Count(); ++i) {
      for (uint64_t j = 0; j < trainer_->elements(i); ++j) {
        reinterpret_cast<float*>(trainer_->Parameter(i))[j] = 1;
        reinterpret_cast<float*>(trainer_->Gradient(i))[j] = 0.1f;
      }
    }
    ASSERT_TRUE(trainer_->PushParameters().ok());
  }
  ~GpuXlaStepTest() override {
    trainer_.reset();
    attachment_.reset();
  }

  size_t Count() const { return static_cast<size_t>(attachment_->optimizer().parameters_size()); }
  float* First() { return reinterpret_cast<float*>(trainer_->Parameter(0)); }

  absl::Status Submit() {
    absl::Status status = trainer_->BeginStep(1);
    for (size_t i = 0; status.ok() && i < Count(); ++i) status = trainer_->GradientReady(i);
    return status;
  }
  // Of the gradient that is there already.
  std::string HandOver() {
    test::XlaCall call(trainer_->stream());
    call.Attribute("submitter", trainer_->submitter()).Attribute("whole", 1);
    call.Attribute("parameters", std::vector<int64_t>{0}).Operand(XLA_FFI_DataType_S32, 1, 0);
    call.Operand(XLA_FFI_DataType_F32, trainer_->elements(0), some_->device());
    return call.Run("hand_over");
  }
  void MakeSome() {
    std::shared_ptr<const kernels::GpuDevice> device;
    Tensor::Require(kernels::GpuDevice::Open(0, &device).code);
    some_ = std::make_unique<Tensor>(device, trainer_->elements(0) * sizeof(float));
  }
  // What was handed over is dropped, and the next step is as any.
  void ExpectHealthy() {
    if (attachment_->AbandonStep().ok()) (void)attachment_->WaitStep();
    const absl::Status submitted = Submit();
    ASSERT_TRUE(submitted.ok()) << submitted;
    ASSERT_TRUE(trainer_->EndStep(1, 0).ok());
    const absl::StatusOr<superoffload_verdict> verdict = trainer_->WaitStep();
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    EXPECT_EQ(verdict->kind, static_cast<uint32_t>(SUPEROFFLOAD_VERDICT_COMMIT));
  }

  // What the stream is given from now on waits for the gate.
  void HoldStream(std::promise<void>* gate) {
    issue_(trainer_->stream(), [](void* held) { static_cast<std::promise<void>*>(held)->get_future().wait(); }, gate);
  }

  int (*const issue_)(void*, void (*)(void*),
                      void*) = OfDriver<int(void*, void (*)(void*), void*)>("fakeCudaIssue");  // null: of a real driver
  std::unique_ptr<XlaGpuTrainer> trainer_;
  std::unique_ptr<Tensor> some_;
};

// They are copied on one stream, which is behind, while the next step comes by another one.
TEST_F(GpuXlaStepTest, AStepEndsAfterTheParametersBeforeItWereCopied) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  if (issue_ == nullptr) GTEST_SKIP() << "a real GPU is not late when told to";
  ASSERT_TRUE(Submit().ok() && trainer_->EndStep(1, 0).ok() && trainer_->WaitStep().ok());
  const float first = *First();
  EXPECT_NE(first, 1);
  std::promise<void> gate;
  HoldStream(&gate);
  ASSERT_TRUE(trainer_->Publish().ok());
  trainer_->SwitchStream();
  std::future<bool> ended = std::async(std::launch::async, [&] {
    trainer_->MakeCurrent();
    return Submit().ok() && trainer_->EndStep(1, 0).ok() && attachment_->WaitStep().ok();
  });
  EXPECT_EQ(ended.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  gate.set_value();
  EXPECT_TRUE(ended.get());
  trainer_->SwitchStream();
  trainer_->Read();
  EXPECT_EQ(*First(), first);
}

// The memory that they are copied from is given back next.
TEST_F(GpuXlaStepTest, ClosingWaitsForParametersThatAreBeingCopied) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  if (issue_ == nullptr) GTEST_SKIP() << "a real GPU is not late when told to";
  ASSERT_TRUE(Submit().ok() && trainer_->EndStep(1, 0).ok() && trainer_->WaitStep().ok());
  std::promise<void> gate;
  HoldStream(&gate);
  ASSERT_TRUE(trainer_->Publish().ok());
  std::future<void> closed = std::async(std::launch::async, [&] { superoffload_close_trainer(trainer_->submitter()); });
  EXPECT_EQ(closed.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  gate.set_value();
  closed.get();
}

TEST_F(GpuXlaStepTest, NoStreamIsCaptured) {
  for (const char* handler : {"hand_over", "read", "publish"}) {
    EXPECT_EQ(test::XlaCall::Traits(handler), 0u) << handler << " may not go into a command buffer";
  }
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  MakeSome();
  const auto begin = OfDriver<int(kernels::CudaStream, int)>("cuStreamBeginCapture_v2");
  const auto end = OfDriver<int(kernels::CudaStream, void**)>("cuStreamEndCapture");
  Tensor::Require(begin(trainer_->stream(), 0));
  EXPECT_THAT(HandOver(), HasSubstr("captured into a CUDA graph"));
  EXPECT_THAT(std::string(trainer_->Publish().message()), HasSubstr("captured into a CUDA graph"));
  void* graph = nullptr;
  Tensor::Require(end(trainer_->stream(), &graph));
  ASSERT_NO_FATAL_FAILURE(ExpectHealthy());
}

TEST_F(GpuXlaStepTest, WhereGradientsMustBeIsSaid) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  const float gradient = 1;
  const superoffload_piece piece{reinterpret_cast<uint64_t>(&gradient), 0, 1, 0, v1::DATA_TYPE_FLOAT32};
  EXPECT_THAT(std::string(attachment_->HandOver({&piece, 1}).message()),
              HasSubstr("parameters are on a GPU, but a gradient is in the host's memory"));
  ASSERT_NO_FATAL_FAILURE(ExpectHealthy());
  superoffload_use_attachment(trainer_->submitter(), nullptr, 0, 0, 0, nullptr);
  MakeSome();
  EXPECT_THAT(HandOver(), HasSubstr("the optimizer is closed"));
  EXPECT_EQ(superoffload_gpu_copy(attachment_->handle(), SUPEROFFLOAD_TO_GPU, 0),
            static_cast<int>(absl::StatusCode::kFailedPrecondition))
      << "it has nothing on the GPU any more but its memory";
}

TEST_F(GpuXlaStepTest, WithoutGpuMemoryForAGradientTheRemedyIsSaid) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  if (!IsFake()) GTEST_SKIP() << "a real GPU does not fail when told to";
  MakeSome();
  ::setenv("FAKE_CUDA_FAIL", "cuMemAlloc_v2=2", 1);
  EXPECT_THAT(HandOver(), HasSubstr("XLA_PYTHON_CLIENT_MEM_FRACTION"));
  ::unsetenv("FAKE_CUDA_FAIL");
  EXPECT_FALSE(trainer_->Arrived().ok()) << "the step must not be ended";
  ASSERT_NO_FATAL_FAILURE(ExpectHealthy());
}

TEST_F(GpuXlaStepTest, WhatPassesThroughIsCopiedWhereXlaWantsItElsewhere) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  MakeSome();
  std::shared_ptr<const kernels::GpuDevice> device;
  Tensor::Require(kernels::GpuDevice::Open(0, &device).code);
  constexpr uint64_t kElements = 37;
  Tensor from(device, kElements * sizeof(float)), to(device, kElements * sizeof(float));
  const auto number = [](Tensor& tensor, size_t i) -> float& { return reinterpret_cast<float*>(tensor.host())[i]; };
  for (uint64_t i = 0; i < kElements; ++i) number(from, i) = static_cast<float>(i);
  Tensor::Require(trainer_->driver().MemcpyHtoDAsync(from.device(), from.host(), from.bytes(), trainer_->stream()));
  test::XlaCall call(trainer_->stream());
  call.Attribute("submitter", trainer_->submitter()).Attribute("whole", 1);
  call.Attribute("parameters", std::vector<int64_t>{0}).Operand(XLA_FFI_DataType_S32, 1, 0);
  call.Operand(XLA_FFI_DataType_F32, kElements, from.device()).Result(XLA_FFI_DataType_F32, kElements, to.device());
  call.Operand(XLA_FFI_DataType_F32, trainer_->elements(0), some_->device());
  ASSERT_EQ(call.Run("hand_over"), "");
  Tensor::Require(trainer_->driver().MemcpyDtoHAsync(to.host(), to.device(), to.bytes(), trainer_->stream()));
  Tensor::Require(trainer_->driver().StreamSynchronize(trainer_->stream()));
  for (uint64_t i = 0; i < kElements; ++i) EXPECT_EQ(number(to, i), static_cast<float>(i));
  ASSERT_NO_FATAL_FAILURE(ExpectHealthy());
}

}  // namespace
}  // namespace superoffload
