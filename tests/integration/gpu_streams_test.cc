// Parameters that stream: what is in which slot, and what is refused. Their bits: gpu_exactness_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/gpu_trainer.h"

namespace superoffload {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kUnits = 5;

class GpuStreamsTest : public GpuTest {
 protected:
  ~GpuStreamsTest() override {
    if (attachment_ != nullptr) superoffload_use_attachment(attachment_->trainer(), nullptr, 0, 0, 0, nullptr);
  }

  void Prepare(uint32_t slots) {
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(AttachStreamed(slots));
    if (!AttachGpu(SUPEROFFLOAD_MOVER_TRAINER)) GTEST_SKIP() << status_;
    ASSERT_TRUE(status_.ok()) << status_;
    Tensor::Require(kernels::GpuDevice::Open(0, &device_).code);
    Tensor::Require(device_->driver().CtxSetCurrent(device_->context()));
    Tensor::Require(kernels::MakeStream(*device_, &stream_).code);
    ASSERT_TRUE(attachment_->PushParameters().ok());
  }
  void AttachStreamed(uint32_t slots, uint32_t gradient_slots = 2, bool in_place = false) {
    Attach(v1::SPECULATION_ALWAYS, kBFloat16, /*log_slots=*/0, gradient_slots, /*logged=*/0, in_place, slots);
  }
  int Read(uint32_t unit) {
    return superoffload_gpu_read_unit(attachment_->handle(), unit, reinterpret_cast<uint64_t>(stream_.get()));
  }
  std::vector<uint32_t> Held() {
    std::vector<uint32_t> held;
    for (uint32_t unit = 1; unit <= kUnits; ++unit) {
      uint32_t has = 0;
      EXPECT_EQ(superoffload_gpu_has_unit(attachment_->handle(), unit, &has), 0) << superoffload_last_error();
      if (has != 0) held.push_back(unit);
    }
    return held;
  }
  int Keep(const std::vector<uint32_t>& units) {
    return superoffload_gpu_keep_units(attachment_->handle(), units.data(), static_cast<uint32_t>(units.size()));
  }
  std::vector<uint32_t> HeldAfter(const std::vector<uint32_t>& read) {
    for (const uint32_t unit : read) EXPECT_EQ(Read(unit), 0) << superoffload_last_error();
    return Held();
  }

  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::OwnedStream stream_;
};

TEST_F(GpuStreamsTest, WhatIsReadNextIsThereBeforeItIsAskedFor) {
  ASSERT_NO_FATAL_FAILURE(Prepare(/*slots=*/3));
  if (IsSkipped()) return;
  EXPECT_THAT(Held(), ElementsAre(3)) << "nothing was asked for, and the third shares its slot with nobody";
  EXPECT_THAT(HeldAfter({1}), ElementsAre(1, 2, 3));
  EXPECT_THAT(HeldAfter({2}), ElementsAre(2, 3, 4));
  EXPECT_THAT(HeldAfter({3, 4, 5}), ElementsAre(3, 4, 5)) << "the last ones stay for the backward pass";
  EXPECT_THAT(HeldAfter({5, 4}), ElementsAre(2, 3, 4));
  EXPECT_THAT(HeldAfter({3, 2, 1}), ElementsAre(1, 2, 3)) << "and the first ones for the next forward pass";
  EXPECT_THAT(HeldAfter({2, 3, 4, 5, 1}), ElementsAre(1, 2, 3)) << "no backward pass";
  EXPECT_THAT(HeldAfter({2, 3, 4, 5}), ElementsAre(1, 3, 5)) << "the first one followed the last time";
}

TEST_F(GpuStreamsTest, OneSlotHoldsWhatIsRead) {
  ASSERT_NO_FATAL_FAILURE(Prepare(/*slots=*/1));
  if (IsSkipped()) return;
  EXPECT_THAT(HeldAfter({1}), ElementsAre(1));
  EXPECT_THAT(HeldAfter({4, 2}), ElementsAre(2));
  // Nothing that the host changes is read from a slot that was filled before.
  ASSERT_EQ(superoffload_gpu_copy(attachment_->handle(), SUPEROFFLOAD_TO_GPU, 0), 0);
  EXPECT_THAT(Held(), ElementsAre());
}

TEST_F(GpuStreamsTest, UnitsThatStayHaveMemoryOfTheirOwn) {
  ASSERT_NO_FATAL_FAILURE(Prepare(/*slots=*/2));
  if (IsSkipped()) return;
  EXPECT_THAT(HeldAfter({1, 2}), ElementsAre(2, 3));
  ASSERT_EQ(Keep({5}), 0) << superoffload_last_error();
  EXPECT_THAT(Held(), ElementsAre(5));
  uint32_t has = 0;
  EXPECT_EQ(superoffload_gpu_has_unit(attachment_->handle(), 5, &has), 0);
  EXPECT_EQ(has, 2u) << "it stays";
  EXPECT_THAT(HeldAfter({1, 2}), ElementsAre(1, 2, 5));
  EXPECT_THAT(HeldAfter({3}), ElementsAre(3, 4, 5)) << "the second one has been read";
  EXPECT_THAT(HeldAfter({4, 5}), ElementsAre(3, 4, 5));
  ASSERT_EQ(superoffload_gpu_copy(attachment_->handle(), SUPEROFFLOAD_TO_GPU, 0), 0);
  EXPECT_THAT(Held(), ElementsAre(5)) << "copied anew";
  ASSERT_EQ(Keep({1, 2, 3, 4, 5}), 0);
  EXPECT_THAT(Held(), ElementsAre(1, 2, 3, 4, 5));
  ASSERT_EQ(Keep({}), 0);
  EXPECT_THAT(Held(), ElementsAre());
}

TEST_F(GpuStreamsTest, WithoutMemoryTheSameUnitsStay) {
  ASSERT_NO_FATAL_FAILURE(Prepare(/*slots=*/2));
  if (IsSkipped()) return;
  constexpr int kInvalidArgument = 3, kResourceExhausted = 8;
  ASSERT_EQ(Keep({4}), 0);
  EXPECT_EQ(Keep({1, kUnits + 1}), kInvalidArgument);
  if (OfDriver<int()>("fakeCudaObjects") != nullptr) {
    ::setenv("FAKE_CUDA_OOM", "2", 1);
    EXPECT_EQ(Keep({1, 2, 4}), kResourceExhausted);
    ::unsetenv("FAKE_CUDA_OOM");
  }
  EXPECT_THAT(Held(), ElementsAre(4));
  EXPECT_THAT(HeldAfter({1}), ElementsAre(1, 2, 4));
}

TEST_F(GpuStreamsTest, WhatCannotBeIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Prepare(/*slots=*/2));
  if (IsSkipped()) return;
  constexpr int kInvalidArgument = 3, kFailedPrecondition = 9;
  EXPECT_EQ(Read(0), kInvalidArgument);
  EXPECT_EQ(Read(kUnits + 1), kInvalidArgument);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("there is no unit 6"));
  EXPECT_EQ(superoffload_gpu_has_unit(attachment_->handle(), 1, nullptr), kInvalidArgument);
  const v1::Placement& streamed = attachment_->optimizer().layout().placements(1);
  EXPECT_EQ(AwaitOnGpu(*attachment_, streamed.first_bucket(), 0), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("superoffload_gpu_read_unit of unit 1"));
  EXPECT_EQ(superoffload_gpu_set_resident(attachment_->handle(), 1000), kFailedPrecondition);
  EXPECT_THAT(superoffload_last_error(), HasSubstr("streams"));
  if (auto* const begin = OfDriver<int(kernels::CudaStream, int)>("cuStreamBeginCapture_v2"); begin != nullptr) {
    constexpr int kRelaxed = 2;
    kernels::OwnedStream captured;
    Tensor::Require(kernels::MakeStream(*device_, &captured).code);
    ASSERT_EQ(begin(captured.get(), kRelaxed), 0);
    EXPECT_EQ(superoffload_gpu_read_unit(attachment_->handle(), 1, reinterpret_cast<uint64_t>(captured.get())),
              kFailedPrecondition);
    EXPECT_THAT(superoffload_last_error(), HasSubstr("captured into a CUDA graph"));
    void* graph = nullptr;
    ASSERT_EQ(OfDriver<int(kernels::CudaStream, void**)>("cuStreamEndCapture")(captured.get(), &graph), 0);
  }
  EXPECT_THAT(HeldAfter({1}), ElementsAre(1, 2)) << "the stream that was refused is forgotten";
}

TEST_F(GpuStreamsTest, ParametersInPlaceDoNotStream) {
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(AttachStreamed(/*slots=*/2, /*gradient_slots=*/1, /*in_place=*/true));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_TRAINER)) GTEST_SKIP() << status_;
  EXPECT_EQ(status_.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status_.message()), HasSubstr("create the optimizer without in_place"));
}

}  // namespace
}  // namespace superoffload
