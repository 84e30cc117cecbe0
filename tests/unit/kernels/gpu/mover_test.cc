// The copies that trainer and daemon share. With the fake driver.
#include "kernels/gpu/mover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/gpu_buffer.h"

namespace superoffload::kernels {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kBuckets = 5, kSlots = 2;
constexpr uint64_t kBytes = 8192, kChunks = 2;  // of a bucket
constexpr uint64_t kSlotsOffset = kBuckets * kBytes, kSumsOffset = kSlotsOffset + kSlots * kBytes;

std::vector<uint64_t>* copied_up = nullptr;  // offsets, in order
CudaPointer gpu_base = 0;

class MoverTest : public ::testing::Test {
 protected:
  MoverTest() {
    for (uint64_t i = 0; i < kBuckets; ++i) {
      memory_.buckets.push_back({.gradient_offsets = {2 * i * kBytes, (2 * i + 1) * kBytes},
                                 .gradient_bytes = kBytes,
                                 .parameters_offset = i * kBytes,
                                 .gpu_offset = i * kBytes,
                                 .parameters_bytes = kBytes,
                                 .chunks = kChunks});
    }
    memory_.gradients = gradients_.bytes();
    memory_.parameters = parameters_.bytes();
    memory_.slots = {kSlots, kSlotsOffset, kBytes, kSumsOffset, 4096};
  }
  ~MoverTest() override { Record(nullptr); }

  // The up stream does nothing until it is released.
  void Hold(const Mover& mover) {
    auto* const issue = test::OfFakeDriver<int(CudaStream, void (*)(void*), void*)>("fakeCudaIssue");
    ASSERT_EQ(
        issue(
            mover.up_stream(), [](void* held) { static_cast<std::promise<void>*>(held)->get_future().wait(); }, &held_),
        0);
  }
  void Release() { held_.set_value(); }

  // The step commits, and these are published one after the other.
  static void Commit(uint64_t step, const std::vector<uint32_t>& buckets, Mover* mover) {
    ASSERT_TRUE(mover->VerdictReached(step, /*commits=*/true, /*speculation_stands=*/false).ok());
    for (const uint32_t bucket : buckets) ASSERT_TRUE(mover->Published(step, bucket, /*speculative=*/false).ok());
  }

  // Each bucket has a value of its own.
  void FillParameters(int first) {
    for (uint32_t i = 0; i < kBuckets; ++i) {
      std::ranges::fill(parameters_.bytes().subspan(i * kBytes, kBytes), std::byte(first + static_cast<int>(i)));
    }
  }
  bool GpuHasParameters() {
    gpu_.Download();
    return std::ranges::equal(gpu_.At<std::byte>(0, kBuckets * kBytes), parameters_.bytes());
  }

  CudaStatus Open(Mover::Options options, std::unique_ptr<Mover>* mover) {
    const CurrentDevice current(*device_);
    options.process = "the test";
    return Mover::Open(device_, gpu_.data(), memory_, std::move(options), mover);
  }

  // With parameters to copy up, which its stream does not do until it is released.
  void OpenHeld(std::unique_ptr<Mover>* mover, std::vector<uint64_t>* copied) {
    FillParameters(1);
    ASSERT_TRUE(Open({}, mover).ok());
    Record(copied);
    Hold(**mover);
  }

  // Fills a device slot with `value` and the sums of its chunks with `sums`.
  void FillSlot(uint64_t slot, int value, double first_sum, double second_sum) {
    std::ranges::fill(gpu_.At<std::byte>(kSlotsOffset + slot * kBytes, kBytes), std::byte(value));
    const std::span<double> sums = gpu_.At<double>(kSumsOffset + slot * 4096, kChunks);
    sums[0] = first_sum;
    sums[1] = second_sum;
    gpu_.Upload();
  }

  void Record(std::vector<uint64_t>* to) {
    copied_up = to;
    gpu_base = gpu_.data();
    auto* const on_copy = test::OfFakeDriver<void(void (*)(uint64_t, size_t))>("fakeCudaOnCopyToGpu");
    on_copy(to == nullptr ? nullptr : +[](uint64_t pointer, size_t) { copied_up->push_back(pointer - gpu_base); });
  }

  std::promise<void> held_;
  test::HostPages gradients_{2 * kBuckets * kBytes}, parameters_{kBuckets * kBytes};
  std::shared_ptr<const GpuDevice> device_ = test::OpenGpu();
  test::GpuBuffer gpu_{device_, kSumsOffset + kSlots * 4096};
  MoverMemory memory_;
};

TEST_F(MoverTest, GradientsArriveInOrderWithTheirSums) {
  FillSlot(0, 3, 1, 2);
  FillSlot(1, 5, 10, 20);
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({}, &mover).ok());
  EXPECT_FALSE(mover->staged());
  std::vector<std::string> calls;  // the thread of arrivals'
  const auto arrived = [&calls](const char* name) {
    return [&calls, name](const CudaStatus& status, double sum) {
      calls.push_back(name + std::to_string(status.code) + " " + std::to_string(static_cast<int>(sum)));
    };
  };
  {
    const CurrentDevice current(*device_);
    ASSERT_TRUE(mover->CopyDown(1, 0, 1, Mover::What::kGradientAndSums, arrived("first ")).ok());
    mover->arrivals().Then([&calls](const CudaStatus&) { calls.push_back("between"); });
    ASSERT_TRUE(mover->CopyDown(0, 1, 0, Mover::What::kSums, arrived("second ")).ok());
  }
  mover->arrivals().WaitEmpty();
  EXPECT_THAT(calls, ElementsAre("first 0 3", "between", "second 0 30"));
  EXPECT_EQ(gradients_.bytes()[3 * kBytes], std::byte{3}) << "bucket 1, host slot 1";
  EXPECT_EQ(gradients_.bytes()[2 * kBytes], std::byte{0}) << "its other slot";
  EXPECT_EQ(gradients_.bytes()[0], std::byte{0}) << "only sums were asked for";
}

TEST_F(MoverTest, ParametersGoUpWhenTheStepHasCommittedTheLastBucketFirst) {
  std::ranges::fill(parameters_.bytes(), std::byte{7});
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({}, &mover).ok());
  std::vector<uint64_t> copied;
  Record(&copied);
  for (const uint32_t bucket : {0, 1}) ASSERT_TRUE(mover->Published(1, bucket, /*speculative=*/true).ok());
  EXPECT_THAT(copied, IsEmpty()) << "before the verdict";
  ASSERT_TRUE(mover->VerdictReached(1, /*commits=*/false, /*speculation_stands=*/false).ok());
  for (const uint32_t bucket : {0, 1}) ASSERT_TRUE(mover->Published(1, bucket, /*speculative=*/false).ok());
  EXPECT_THAT(copied, IsEmpty()) << "of a step that was skipped";
  for (const uint32_t bucket : {0, 1}) ASSERT_TRUE(mover->Published(2, bucket, /*speculative=*/true).ok());
  ASSERT_TRUE(mover->VerdictReached(2, /*commits=*/true, /*speculation_stands=*/true).ok());
  EXPECT_THAT(copied, ElementsAre(kBytes, 0));
  Record(nullptr);
  const CurrentDevice current(*device_);
  OwnedStream reader;
  ASSERT_TRUE(MakeStream(*device_, &reader).ok());
  for (const uint32_t bucket : {0, 1}) ASSERT_TRUE(mover->WaitLanded(bucket, reader.get()).ok());
  ASSERT_EQ(device_->driver().StreamSynchronize(reader.get()), 0);
  gpu_.Download();
  EXPECT_EQ(gpu_.At<std::byte>(0, 1)[0], std::byte{7});
  EXPECT_EQ(gpu_.At<std::byte>(2 * kBytes - 1, 1)[0], std::byte{7});
}

TEST_F(MoverTest, AFewCopiesAreUnderWayAndWhatIsNeededEarlierPassesTheOthers) {
  std::unique_ptr<Mover> mover;
  std::vector<uint64_t> copied;
  ASSERT_NO_FATAL_FAILURE(OpenHeld(&mover, &copied));
  Commit(1, {0, 1, 2, 3, 4}, mover.get());
  EXPECT_THAT(copied, ElementsAre(0, kBytes));
  Release();
  const CurrentDevice current(*device_);
  ASSERT_TRUE(mover->WaitAllLanded().ok());
  EXPECT_THAT(copied, ElementsAre(0, kBytes, 4 * kBytes, 3 * kBytes, 2 * kBytes));
  Record(nullptr);
  EXPECT_TRUE(GpuHasParameters());
}

TEST_F(MoverTest, WhoWaitsForABucketThatIsDueHasItCopiedAtOnce) {
  std::unique_ptr<Mover> mover;
  std::vector<uint64_t> copied;
  ASSERT_NO_FATAL_FAILURE(OpenHeld(&mover, &copied));
  Commit(1, {4, 3, 2, 1, 0}, mover.get());
  const CurrentDevice current(*device_);
  OwnedStream reader;
  ASSERT_TRUE(MakeStream(*device_, &reader).ok());
  for (const uint32_t bucket : {1, 0, 2, 0}) ASSERT_TRUE(mover->WaitLanded(bucket, reader.get()).ok());
  EXPECT_THAT(copied, ElementsAre(4 * kBytes, 3 * kBytes, kBytes, 0, 2 * kBytes));
  Release();
  ASSERT_EQ(device_->driver().StreamSynchronize(reader.get()), 0);
  Record(nullptr);
  EXPECT_TRUE(GpuHasParameters());
}

// Their gradients of the next step are not handed over before they have landed, but others' may be.
TEST_F(MoverTest, WhatIsDueIsCopiedInTheStepsThatFollow) {
  std::unique_ptr<Mover> mover;
  std::vector<uint64_t> copied;
  ASSERT_NO_FATAL_FAILURE(OpenHeld(&mover, &copied));
  Commit(1, {4, 3, 2, 1, 0}, mover.get());
  ASSERT_TRUE(mover->Published(2, 4, /*speculative=*/true).ok());
  ASSERT_TRUE(mover->VerdictReached(2, /*commits=*/false, /*speculation_stands=*/false).ok());
  ASSERT_TRUE(mover->Published(3, 4, /*speculative=*/true).ok());
  Release();
  const CurrentDevice current(*device_);
  ASSERT_TRUE(mover->WaitAllLanded().ok());
  EXPECT_THAT(copied, ElementsAre(4 * kBytes, 3 * kBytes, 2 * kBytes, kBytes, 0));
  Record(nullptr);
  EXPECT_TRUE(GpuHasParameters());
}

TEST_F(MoverTest, WhatIsDueLandsBeforeAMoverEnds) {
  FillParameters(1);
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({}, &mover).ok());
  const test::FakeCudaSetting slow("FAKE_CUDA_SLOW", "HtoD=5000");
  Commit(1, {4, 3, 2, 1, 0}, mover.get());
  mover.reset();
  EXPECT_TRUE(GpuHasParameters());
}

// Nobody asked for the copies that follow others: whoever waits learns of it.
TEST_F(MoverTest, ACopyThatFailsLaterIsAnErrorOfWhoeverWaits) {
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({}, &mover).ok());
  Hold(*mover);
  Commit(1, {4, 3, 2, 1, 0}, mover.get());
  const CurrentDevice current(*device_);
  {
    const test::FakeCudaSetting fail("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2=719");
    Release();
    EXPECT_FALSE(mover->WaitAllLanded().ok());
  }
  OwnedStream reader;
  ASSERT_TRUE(MakeStream(*device_, &reader).ok());
  EXPECT_THAT(mover->WaitLanded(0, reader.get()).message, HasSubstr("copying parameters to the GPU"));
  EXPECT_THAT(mover->VerdictReached(2, true, false).message, HasSubstr("copying parameters to the GPU"));
}

TEST_F(MoverTest, ABucketThatStaysBehindIsNotCopiedUp) {
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({}, &mover).ok());
  std::vector<uint64_t> copied;
  Record(&copied);
  mover->SetCopiesUp(1, false);
  ASSERT_TRUE(mover->VerdictReached(1, true, false).ok());
  for (const uint32_t bucket : {0, 1}) ASSERT_TRUE(mover->Published(1, bucket, false).ok());
  EXPECT_THAT(copied, ElementsAre(0));
}

// Such a copy waits in the driver, and the trainer's thread must not.
TEST_F(MoverTest, CopiesOfMemoryThatIsNotRegisteredAreIssuedByTheQueue) {
  FillSlot(0, 3, 1, 2);
  std::unique_ptr<Mover> mover;
  {
    const test::FakeCudaSetting fail("FAKE_CUDA_FAIL", "cuMemHostRegister_v2=304");
    ASSERT_TRUE(Open({}, &mover).ok());
  }
  EXPECT_TRUE(mover->staged());
  ASSERT_EQ(mover->unregistered().size(), 2u);
  EXPECT_THAT(mover->unregistered()[0].message, HasSubstr("of the test"));
  auto* const stall = test::OfFakeDriver<void(const char*)>("fakeCudaStall");
  stall("cuMemcpyDtoHAsync_v2");
  std::promise<double> sum;
  {
    const CurrentDevice current(*device_);
    ASSERT_TRUE(mover
                    ->CopyDown(0, 0, 0, Mover::What::kGradientAndSums,
                               [&sum](const CudaStatus&, double value) { sum.set_value(value); })
                    .ok());
  }
  stall(nullptr);  // it returned while nobody could have copied
  EXPECT_EQ(sum.get_future().get(), 3);
  EXPECT_EQ(gradients_.bytes()[0], std::byte{3});
}

TEST_F(MoverTest, ItsThreadIssuesCopiesAndTellsOfEach) {
  std::promise<void> both;
  std::vector<std::string> told;  // one thread at a time
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({.upload_thread = true,
                    .landed =
                        [&](uint64_t step, uint32_t bucket, const CudaStatus& status) {
                          told.push_back(std::to_string(step) + "/" + std::to_string(bucket) +
                                         (status.ok() ? "" : "!"));
                          if (told.size() == 2) both.set_value();
                        }},
                   &mover)
                  .ok());
  for (const uint32_t bucket : {0, 1}) ASSERT_TRUE(mover->Published(4, bucket, true).ok());
  ASSERT_TRUE(mover->VerdictReached(4, true, true).ok());
  both.get_future().wait();
  EXPECT_THAT(told, ElementsAre("4/1", "4/0"));
}

TEST_F(MoverTest, ACopyThatCannotBeIssuedIsTold) {
  std::promise<CudaStatus> told;
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({.upload_thread = true,
                    .landed = [&](uint64_t, uint32_t, const CudaStatus& status) { told.set_value(status); }},
                   &mover)
                  .ok());
  const test::FakeCudaSetting fail("FAKE_CUDA_FAIL", "cuMemcpyHtoDAsync_v2=719");
  ASSERT_TRUE(mover->VerdictReached(1, true, false).ok());
  ASSERT_TRUE(mover->Published(1, 0, false).ok());
  EXPECT_THAT(told.get_future().get().message, HasSubstr("copying parameters to the GPU"));
}

TEST_F(MoverTest, EverythingIsGivenBackWhateverFails) {
  auto* const objects = test::OfFakeDriver<int()>("fakeCudaObjects");
  const int before = objects();
  for (const char* failing : {"", "cuStreamCreate=2", "cuEventCreate=2", "cuMemHostAlloc=2"}) {
    const test::FakeCudaSetting fail("FAKE_CUDA_FAIL", failing);
    std::unique_ptr<Mover> mover;
    EXPECT_EQ(Open({}, &mover).ok(), *failing == '\0') << failing;
    mover.reset();
    EXPECT_EQ(objects(), before) << failing;
  }
}

TEST_F(MoverTest, ABucketThatDoesNotExistIsAMistakeOfOurs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the mover has threads
  std::unique_ptr<Mover> mover;
  ASSERT_TRUE(Open({}, &mover).ok());
  EXPECT_DEATH((void)mover->Published(1, kBuckets, false), "mover.cc");
  EXPECT_DEATH((void)mover->CopyDown(0, kSlots, 0, Mover::What::kSums, nullptr), "mover.cc");
}

}  // namespace
}  // namespace superoffload::kernels
