// What machines with GPUs do to a trainer, each of which the fake driver can be: memory that cannot be registered,
// copies that wait, graphs that are being captured, allocations that fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>

#include "tests/support/gpu_trainer.h"

namespace superoffload {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::minutes kHang{2};  // what has not returned by then never will

class GpuMachineTest : public GpuTest {
 protected:
  // With what is set in the environment now.
  void AttachTo(superoffload_mover mover) {
    StartDaemon();
    ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
    if (!AttachGpu(mover)) GTEST_SKIP() << status_;
    ASSERT_TRUE(status_.ok()) << status_;
  }

  superoffload_attachment* handle() const { return attachment_->handle(); }
  uint32_t buckets() const { return static_cast<uint32_t>(attachment_->optimizer().layout().buckets_size()); }

  // Stays current for this thread.
  static std::shared_ptr<const kernels::GpuDevice> OpenCurrentGpu() {
    std::shared_ptr<const kernels::GpuDevice> device;
    Tensor::Require(kernels::GpuDevice::Open(0, &device).code);
    Tensor::Require(device->driver().CtxSetCurrent(device->context()));
    return device;
  }

  void TrainExactly(int seed) {
    GpuTrainer trainer(client_.get(), attachment_.get(), NoResidents);
    test::ExactTraining(&trainer, test::Spec(kBFloat16), kBFloat16, static_cast<uint64_t>(seed)).Train(40);
  }
};

// Where copies of the daemon's memory wait in the driver, only a thread of the library's own waits with them.
TEST_F(GpuMachineTest, SubmittingNeverWaitsForACopy) {
  for (const char* const machine : {"h100-pcie", "hmm"}) {
    for (const char* const failure : {"", "cuMemHostRegister_v2=304"}) {
      SCOPED_TRACE(std::string(machine) + " " + failure);
      ::setenv("FAKE_CUDA_MACHINE", machine, 1);
      ::setenv("FAKE_CUDA_FAIL", failure, 1);
      ASSERT_NO_FATAL_FAILURE(AttachTo(SUPEROFFLOAD_MOVER_TRAINER));
      if (IsSkipped()) return;
      ASSERT_TRUE(attachment_->PushParameters().ok());  // no step begins before
      auto* const stall = OfDriver<void(const char*)>("fakeCudaStall");
      if (stall == nullptr) GTEST_SKIP() << "a real driver cannot be told to wait";
      const bool staged = std::string(failure) != "";
      EXPECT_EQ(report_.staged, staged);
      if (staged) stall("cuMemcpyDtoHAsync_v2");
      std::future<bool> submitted = std::async(std::launch::async, [&] { return HandOverNothing().ok(); });
      const bool returned = submitted.wait_for(kHang) == std::future_status::ready;
      if (staged && returned) OfDriver<void()>("fakeCudaAwaitStalled")();
      stall(nullptr);
      EXPECT_TRUE(returned);
      EXPECT_TRUE(submitted.get());
      Abandon();
      ::unsetenv("FAKE_CUDA_FAIL");
      attachment_.reset();
    }
  }
}

// In a graph's replay nothing would be submitted, and nobody would wait for parameters.
TEST_F(GpuMachineTest, AStreamThatIsBeingCapturedIsRefused) {
  for (const superoffload_mover mover : {SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_TRAINER}) {
    ASSERT_NO_FATAL_FAILURE(AttachTo(mover));
    if (IsSkipped()) return;
    ASSERT_TRUE(attachment_->PushParameters().ok());  // no step begins before
    const std::shared_ptr<const kernels::GpuDevice> device = OpenCurrentGpu();
    kernels::OwnedStream stream;
    Tensor::Require(kernels::MakeStream(*device, &stream).code);
    const auto number = reinterpret_cast<uint64_t>(stream.get());
    Tensor gradient(device, 2 * 90 * 300);
    constexpr int kRelaxed = 2;
    ASSERT_EQ(OfDriver<int(kernels::CudaStream, int)>("cuStreamBeginCapture_v2")(stream.get(), kRelaxed), 0);
    const auto expect_refused = [](int code) {
      EXPECT_EQ(code, static_cast<int>(absl::StatusCode::kFailedPrecondition));
      EXPECT_THAT(std::string(superoffload_last_error()), HasSubstr("CUDA graph"));
    };
    expect_refused(static_cast<int>(HandOver(0, gradient.device(), stream.get()).code()));
    expect_refused(AwaitOnGpu(*attachment_, 0, number));
    expect_refused(superoffload_gpu_copy(handle(), SUPEROFFLOAD_FROM_GPU, number));
    ASSERT_TRUE(HandOverNothing().ok()) << superoffload_last_error();
    const superoffload_step_end end{1, 0, 0, SUPEROFFLOAD_END, 1, &number};
    expect_refused(superoffload_end(attachment_->trainer(), &end));
    Abandon();
    void* graph = nullptr;
    ASSERT_EQ(OfDriver<int(kernels::CudaStream, void**)>("cuStreamEndCapture")(stream.get(), &graph), 0);
    EXPECT_TRUE(HandOver(0, gradient.device(), stream.get()).ok()) << superoffload_last_error();
    Abandon();
    TrainExactly(7);
    attachment_.reset();
  }
}

// A capture of some other stream, in the mode that forbids the most, stops none of the copies and is not lost by them.
TEST_F(GpuMachineTest, AStepGoesOnWhileAnotherStreamIsBeingCaptured) {
  for (const superoffload_mover mover : {SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_TRAINER}) {
    SCOPED_TRACE(mover);
    ASSERT_NO_FATAL_FAILURE(AttachTo(mover));
    if (IsSkipped()) return;
    ASSERT_TRUE(attachment_->PushParameters().ok());  // no step begins before
    const std::shared_ptr<const kernels::GpuDevice> device = OpenCurrentGpu();
    Tensor gradient(device, 2 * 90 * 300);
    kernels::OwnedStream computes, captured;
    Tensor::Require(kernels::MakeStream(*device, &computes).code);
    Tensor::Require(kernels::MakeStream(*device, &captured).code);
    constexpr int kGlobal = 0;
    ASSERT_EQ(OfDriver<int(kernels::CudaStream, int)>("cuStreamBeginCapture_v2")(captured.get(), kGlobal), 0);
    for (int step = 0; step < 3; ++step) {
      for (int i = 0; i < attachment_->optimizer().parameters_size(); ++i) {
        EXPECT_TRUE(HandOver(i, gradient.device(), computes.get()).ok()) << superoffload_last_error();
      }
      ASSERT_TRUE(attachment_->EndStep().ok());
      for (uint32_t bucket = 0; bucket < buckets(); ++bucket) {
        EXPECT_EQ(AwaitOnGpu(*attachment_, bucket, reinterpret_cast<uint64_t>(computes.get())), 0)
            << superoffload_last_error();
      }
      EXPECT_TRUE(attachment_->WaitStep().ok());
    }
    EXPECT_EQ(superoffload_gpu_set_resident(handle(), 2), 0) << superoffload_last_error();
    uint64_t masters = 0;
    EXPECT_EQ(superoffload_gpu_resident_masters(handle(), buckets() - 1, &masters), 0) << superoffload_last_error();
    EXPECT_NE(masters, 0u);
    EXPECT_EQ(superoffload_gpu_resident_masters(handle(), 0, &masters),
              static_cast<int>(absl::StatusCode::kFailedPrecondition));
    EXPECT_THAT(superoffload_last_error(), HasSubstr("bucket 0 is not resident"));
    void* graph = nullptr;
    EXPECT_EQ(OfDriver<int(kernels::CudaStream, void**)>("cuStreamEndCapture")(captured.get(), &graph), 0);
    attachment_.reset();
  }
}

// Whichever allocation finds no memory, the answer says so or something else works, and nothing stays behind.
TEST_F(GpuMachineTest, NoAllocationThatFailsLeavesAnythingBehind) {
  StartDaemon();
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_AUTO)) GTEST_SKIP() << status_;
  attachment_.reset();
  auto* const objects = OfDriver<int()>("fakeCudaObjects");
  if (objects == nullptr) GTEST_SKIP() << "a real GPU does not run out of memory when told to";
  const int before = objects();
  int failed = 0;
  bool all = false;
  for (int allocation = 1; !all; ++allocation) {
    SCOPED_TRACE("allocation " + std::to_string(allocation));
    ASSERT_LT(allocation, 100);
    v1::AttachOptimizerRequest request;
    request.set_name("exact");
    request.set_sync(v1::SYNC_PUSH);
    auto attached = client_->Attach(request);
    ASSERT_TRUE(attached.ok()) << attached.status();
    attachment_ = *std::move(attached);
    ::setenv("FAKE_CUDA_OOM", std::to_string(allocation).c_str(), 1);
    AttachGpu(SUPEROFFLOAD_MOVER_AUTO);
    int code = static_cast<int>(status_.code());
    if (status_.ok()) code = superoffload_gpu_set_resident(handle(), 3);
    ::unsetenv("FAKE_CUDA_OOM");
    all = code == 0;
    if (!all) {
      ++failed;
      EXPECT_EQ(code, static_cast<int>(absl::StatusCode::kResourceExhausted)) << superoffload_last_error();
      EXPECT_THAT(status_.ok() ? superoffload_last_error() : std::string(status_.message()), HasSubstr("memory"));
    }
    if (status_.ok()) {  // what there is can be trained with
      EXPECT_EQ(superoffload_gpu_copy(handle(), SUPEROFFLOAD_TO_GPU, 0), 0) << superoffload_last_error();
    }
    attachment_.reset();
    EXPECT_EQ(objects(), before);
  }
  EXPECT_GE(failed, 4) << "the memory, the tables, and each of the residents";
}

// The daemon's own allocations: the trainer copies, and says why.
TEST_F(GpuMachineTest, ADaemonWithoutMemoryLeavesTheCopyingToTheTrainer) {
  ::setenv("FAKE_CUDA_FAIL", "cuMemHostAlloc=2", 1);
  StartDaemon();
  ::unsetenv("FAKE_CUDA_FAIL");
  ASSERT_NO_FATAL_FAILURE(Attach(v1::SPECULATION_ALWAYS, kBFloat16));
  if (!AttachGpu(SUPEROFFLOAD_MOVER_AUTO)) GTEST_SKIP() << status_;
  ASSERT_TRUE(status_.ok()) << status_;
  if (!IsFake()) GTEST_SKIP() << "a real GPU does not run out of memory when told to";
  EXPECT_NE(report_.mover, static_cast<uint32_t>(SUPEROFFLOAD_MOVER_DAEMON));
  EXPECT_THAT(std::string(report_.notes), HasSubstr("out of memory"));
  TrainExactly(9);
}

}  // namespace
}  // namespace superoffload
