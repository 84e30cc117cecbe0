// On a GPU, parameters change when a step commits and at no other time: whoever copies, whatever was speculated, and
// however late the GPU is. With the fake driver, through whose alias the live parameters are read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "superoffload/v1/step_ring.h"
#include "tests/support/gpu_buffer.h"
#include "tests/support/gpu_trainer.h"

namespace superoffload {
namespace {

struct StepCase {
  superoffload_mover mover;
  uint32_t residents;
};

void PrintTo(const StepCase& c, std::ostream* out) { *out << c.mover << " " << c.residents; }

std::mutex copied_mu;
std::vector<uint64_t> copied;  // device pointers, in the order of their copies

class GpuStepTest : public GpuTest, public ::testing::WithParamInterface<StepCase> {
 protected:
  // Attached, with parameters that are not all zero, and with gradients.
  void Prepare() {
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
    if (!AttachGpu(GetParam().mover)) GTEST_SKIP() << status_;
    ASSERT_TRUE(status_.ok()) << status_;
    alias_ = OfDriver<uint64_t(uint64_t)>("fakeCudaAlias");
    if (alias_ == nullptr) GTEST_SKIP() << "the host cannot look into a real GPU's memory beside its streams";
    Tensor::Require(kernels::GpuDevice::Open(0, &device_).code);
    Tensor::Require(device_->driver().CtxSetCurrent(device_->context()));
    Tensor::Require(kernels::MakeStream(*device_, &stream_).code);
    gradient_ = std::make_unique<Tensor>(device_, kGradientBytes);
    const std::span<std::byte> host = MemoryOf(handle(), SUPEROFFLOAD_REGION_PARAMETERS);
    host_ = host;
    for (size_t i = 0; i < host.size(); i += 2) {
      const uint16_t one = 0x3f80;
      std::memcpy(host.data() + i, &one, sizeof(one));
    }
    ASSERT_TRUE(attachment_->PushParameters().ok());
    ASSERT_EQ(superoffload_gpu_copy(handle(), SUPEROFFLOAD_TO_GPU, 0), 0);
    ASSERT_EQ(superoffload_gpu_set_resident(handle(), GetParam().residents), 0);
  }

  superoffload_attachment* handle() const { return attachment_->handle(); }
  int parameters() const { return attachment_->optimizer().parameters_size(); }
  const v1::Layout& layout() const { return attachment_->optimizer().layout(); }
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_.get()); }

  // The live parameters.
  const std::byte* Live() const { return reinterpret_cast<std::byte*>(alias_(attachment_->gpu_report().parameters)); }
  std::vector<std::byte> LiveNow() const { return {Live(), Live() + host_.size()}; }
  bool LiveIsHosts() const {
    for (const v1::Bucket& bucket : layout().buckets()) {
      const size_t bytes = bucket.elements() * 2;
      if (std::memcmp(Live() + bucket.parameters_offset(), host_.data() + bucket.parameters_offset(), bytes) != 0) {
        return false;
      }
    }
    return true;
  }

  // Begins a step with this for every gradient.
  void SubmitAll(uint16_t bfloat16) {
    for (size_t i = 0; i < kGradientBytes; i += 2) std::memcpy(gradient_->host() + i, &bfloat16, sizeof(bfloat16));
    Tensor::Require(
        device_->driver().MemcpyHtoDAsync(gradient_->device(), gradient_->host(), kGradientBytes, stream_.get()));
    ASSERT_TRUE(attachment_->BeginStep().ok());
    for (int i = 0; i < parameters(); ++i) {
      const absl::Status status = HandOver(i, gradient_->device(), stream_.get());
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // Waits until the daemon has published speculative parameters of every bucket in host memory.
  void WaitSpeculated(const std::vector<std::byte>& before) const {
    for (int i = 0; i < parameters(); ++i) {
      size_t bytes = 2;
      for (const uint64_t extent : attachment_->optimizer().parameters(i).shape()) bytes *= extent;
      const size_t end = layout().placements(i).parameters_offset() + bytes;
      const volatile std::byte* const last = host_.data() + end - 1;
      const volatile std::byte* const low = last - 1;
      while (*last == before[end - 1] && *low == before[end - 2]) std::this_thread::yield();
    }
  }

  void AwaitAll() {
    for (uint32_t i = static_cast<uint32_t>(layout().buckets_size()); i-- > 0;) {
      ASSERT_EQ(AwaitOnGpu(*attachment_, i, stream()), 0) << superoffload_last_error();
    }
    ASSERT_TRUE(attachment_->WaitStep().ok());
    Tensor::Require(device_->driver().StreamSynchronize(stream_.get()));
  }

  static constexpr size_t kGradientBytes = 2 * 90 * 300;  // of the largest parameter
  static constexpr uint16_t kTenth = 0x3dcd, kInfinity = 0x7f80;

  uint64_t (*alias_)(uint64_t) = nullptr;
  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::OwnedStream stream_;
  std::unique_ptr<Tensor> gradient_;
  std::span<std::byte> host_;
};

TEST_P(GpuStepTest, LiveParametersChangeOnlyWhenTheStepCommits) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  struct {
    uint16_t gradient;
    double max_grad_norm;
    uint32_t verdict;
  } const steps[] = {{kTenth, 0, SUPEROFFLOAD_VERDICT_COMMIT},
                     {kTenth, 1e-3, SUPEROFFLOAD_VERDICT_CLIP},
                     {kInfinity, 0, SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE},
                     {kTenth, 0, SUPEROFFLOAD_VERDICT_COMMIT}};
  for (const auto& step : steps) {
    const std::vector<std::byte> before = LiveNow();
    ASSERT_NO_FATAL_FAILURE(SubmitAll(step.gradient));
    if (step.gradient != kInfinity) WaitSpeculated(before);
    for (int look = 0; look < 50; ++look) {
      ASSERT_EQ(std::memcmp(Live(), before.data(), before.size()), 0) << "before the step's end";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(attachment_->EndStep(1, step.max_grad_norm).ok());
    const absl::StatusOr<superoffload_verdict> verdict = attachment_->WaitVerdict();
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    EXPECT_EQ(verdict->kind, step.verdict);
    ASSERT_NO_FATAL_FAILURE(AwaitAll());
    EXPECT_EQ(std::memcmp(Live(), before.data(), before.size()) == 0, step.gradient == kInfinity);
    EXPECT_TRUE(LiveIsHosts());
  }
  attachment_.reset();
}

// The daemon writes a bucket's next parameters where the last ones are copied from: so a gradient must not get there
// before they have landed, even if nobody waited for them. A skip would leave in HBM what was half overwritten.
TEST_P(GpuStepTest, AGradientDoesNotOvertakeTheParametersBeforeIt) {
  ::setenv("FAKE_CUDA_SLOW", "HtoD=5000", 1);
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_TRUE(attachment_->WaitVerdict().ok());
  ASSERT_TRUE(attachment_->BeginStep().ok());
  for (int i = 0; i < parameters(); ++i) {
    // The last one has the step skipped.
    const uint16_t bits = i + 1 < parameters() ? kTenth : kInfinity;
    if (bits == kInfinity) {
      Tensor::Require(device_->driver().StreamSynchronize(
          reinterpret_cast<kernels::CudaStream>(attachment_->gpu_report().pack_stream)));  // those before are packed
      for (size_t j = 0; j < kGradientBytes; j += 2) std::memcpy(gradient_->host() + j, &bits, sizeof(bits));
      Tensor::Require(
          device_->driver().MemcpyHtoDAsync(gradient_->device(), gradient_->host(), kGradientBytes, stream_.get()));
    }
    ASSERT_TRUE(HandOver(i, gradient_->device(), stream_.get()).ok()) << superoffload_last_error();
  }
  ASSERT_TRUE(attachment_->EndStep().ok());
  const absl::StatusOr<superoffload_verdict> verdict = attachment_->WaitVerdict();
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->kind, static_cast<uint32_t>(SUPEROFFLOAD_VERDICT_SKIP_NON_FINITE));
  ASSERT_NO_FATAL_FAILURE(AwaitAll());
  EXPECT_TRUE(LiveIsHosts());
  attachment_.reset();
}

// Handing parameters over copies them to where their last copies come from.
TEST_P(GpuStepTest, HandingParametersOverHandsOverTheLatest) {
  ::setenv("FAKE_CUDA_SLOW", "HtoD=5000", 1);
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_TRUE(attachment_->WaitStep().ok());
  const std::vector<std::byte> published(host_.begin(), host_.end());
  ASSERT_EQ(superoffload_gpu_copy(handle(), SUPEROFFLOAD_FROM_GPU, stream()), 0) << superoffload_last_error();
  EXPECT_TRUE(std::ranges::equal(host_, published));
  EXPECT_TRUE(LiveIsHosts());
  attachment_.reset();
}

// Work on a stream that reads the parameters once it may.
struct Reader {
  void LaunchOn(kernels::CudaStream stream) {
    OfDriver<int(kernels::CudaStream, void (*)(void*), void*)>("fakeCudaIssue")(
        stream,
        [](void* argument) {
          auto* const self = static_cast<Reader*>(argument);
          self->may_run.get_future().wait();
          std::memcpy(self->seen.data(), self->live, self->seen.size());
        },
        this);
  }

  const std::byte* live;
  std::vector<std::byte> seen;
  std::promise<void> may_run;
};

// Whatever was launched before the step's end reads the parameters of the step before, however late it runs: on a
// stream that gradients came from, and on one that the end names.
TEST_P(GpuStepTest, WhatWasLaunchedBeforeTheStepsEndReadsWhatWasThere) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  kernels::OwnedStream beside;
  Tensor::Require(kernels::MakeStream(*device_, &beside).code);
  for (const kernels::CudaStream reads : {stream_.get(), beside.get()}) {
    const std::vector<std::byte> before = LiveNow();
    ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
    Reader reader{Live(), std::vector<std::byte>(before.size()), {}};
    reader.LaunchOn(reads);
    const auto named = reinterpret_cast<uint64_t>(reads);
    const superoffload_step_end end{1, 0, 0, SUPEROFFLOAD_END, reads == beside.get(), &named};
    ASSERT_EQ(superoffload_end(attachment_->trainer(), &end), 0) << superoffload_last_error();
    constexpr absl::Duration kLongEnoughForAStep =
        absl::Milliseconds(300);  // if it did not wait; nothing depends on it
    EXPECT_TRUE(absl::IsDeadlineExceeded(attachment_->WaitVerdict(kLongEnoughForAStep).status()));
    reader.may_run.set_value();
    ASSERT_NO_FATAL_FAILURE(AwaitAll());
    EXPECT_EQ(reader.seen, before);
    EXPECT_NE(LiveNow(), before);
    EXPECT_TRUE(LiveIsHosts());
  }
  attachment_.reset();
}

// A loop that ends with a step, and waits for nothing of it, keeps its parameters.
TEST_P(GpuStepTest, AnAttachmentIsLeftWithTheParametersOfTheLastStep) {
  ::setenv("FAKE_CUDA_SLOW", "HtoD=5000", 1);
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  const std::vector<std::byte> before = LiveNow();
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_EQ(superoffload_use_attachment(attachment_->trainer(), nullptr, 0, 0, 0, nullptr), 0);
  EXPECT_NE(LiveNow(), before);
  EXPECT_TRUE(LiveIsHosts());
  attachment_.reset();
}

// A loop that reads parameters only after it has handed gradients of the next step over must not wait for ever.
TEST_P(GpuStepTest, ParametersOfTheLastStepCanBeAwaitedInTheNext) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_TRUE(attachment_->WaitVerdict().ok());
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  ASSERT_TRUE(attachment_->WaitNorm().ok());  // completions have come
  constexpr int kHangMilliseconds = 60'000;
  for (uint32_t i = 0; i < static_cast<uint32_t>(layout().buckets_size()); ++i) {
    ASSERT_EQ(AwaitOnGpu(*attachment_, i, stream(), kHangMilliseconds), 0) << superoffload_last_error();
  }
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_NO_FATAL_FAILURE(AwaitAll());
  EXPECT_TRUE(LiveIsHosts());
  attachment_.reset();
}

TEST_P(GpuStepTest, AnotherGpuReachesTheParametersFromTheStepAfterItsFirstUseOn) {
  const test::FakeCudaSetting gpus("FAKE_CUDA_UUID", "0,7");
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  const auto accessors = [this] {
    return OfDriver<int(uint64_t)>("fakeCudaAccessors")(attachment_->gpu_report().parameters);
  };
  EXPECT_EQ(accessors(), 1) << "the process only sees the other";
  std::shared_ptr<const kernels::GpuDevice> other;
  Tensor::Require(kernels::GpuDevice::Open(1, &other).code);
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_NO_FATAL_FAILURE(AwaitAll());
  EXPECT_EQ(accessors(), 2);
  attachment_.reset();
}

std::string NameOf(const ::testing::TestParamInfo<StepCase>& info) {
  constexpr const char* kNames[] = {"", "Daemon", "Trainer", "Direct"};
  return std::string(kNames[info.param.mover]) + (info.param.residents > 0 ? "Resident" : "");
}

constexpr StepCase kDaemon{SUPEROFFLOAD_MOVER_DAEMON, 0}, kDaemonResident{SUPEROFFLOAD_MOVER_DAEMON, 3},
    kTrainer{SUPEROFFLOAD_MOVER_TRAINER, 0}, kTrainerResident{SUPEROFFLOAD_MOVER_TRAINER, 3},
    kDirect{SUPEROFFLOAD_MOVER_DIRECT, 0}, kDirectResident{SUPEROFFLOAD_MOVER_DIRECT, 3};

INSTANTIATE_TEST_SUITE_P(All, GpuStepTest,
                         ::testing::Values(kDaemon, kDaemonResident, kTrainer, kTrainerResident, kDirect,
                                           kDirectResident),
                         NameOf);

class GpuUploadOrderTest : public GpuStepTest {};

TEST_P(GpuUploadOrderTest, TheBucketThatForwardReadsFirstComesFirst) {
  ASSERT_NO_FATAL_FAILURE(Prepare());
  if (IsSkipped()) return;
  const std::vector<std::byte> before = LiveNow();
  ASSERT_NO_FATAL_FAILURE(SubmitAll(kTenth));
  WaitSpeculated(before);
  auto* const on_copy = OfDriver<void(void (*)(uint64_t, size_t))>("fakeCudaOnCopyToGpu");
  copied.clear();
  on_copy([](uint64_t pointer, size_t) {
    std::lock_guard lock(copied_mu);
    copied.push_back(pointer);
  });
  ASSERT_TRUE(attachment_->EndStep().ok());
  ASSERT_NO_FATAL_FAILURE(AwaitAll());
  on_copy(nullptr);
  std::vector<uint64_t> expected;
  for (int i = layout().buckets_size() - static_cast<int>(GetParam().residents); i-- > 0;) {
    expected.push_back(attachment_->gpu_report().parameters + layout().buckets(i).parameters_offset());
  }
  EXPECT_EQ(copied, expected);
  attachment_.reset();
}

// The daemon's order: DeviceMoverTest.
INSTANTIATE_TEST_SUITE_P(All, GpuUploadOrderTest, ::testing::Values(kTrainer, kTrainerResident, kDirect), NameOf);

}  // namespace
}  // namespace superoffload
