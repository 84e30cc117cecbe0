// The tests' GPU under the other clock is as unforgiving as in libcuda.so.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/cuda/kernels.cuh"
#include "kernels/gpu/cuda_device.h"
#include "server/simulator/simulated_cuda.h"
#include "tests/support/fake_cuda/process.h"

namespace superoffload {
namespace {

using kernels::CudaDriver;
using kernels::CudaEvent;
using kernels::CudaStream;
using namespace simulator::cuda_results;

fake_cuda::Machine Pcie() { return fake_cuda::FindMachine("h100-pcie"); }

class FakeGpuInVirtualTimeTest : public ::testing::Test {
 protected:
  FakeGpuInVirtualTimeTest() {
    EXPECT_EQ(driver().StreamCreate(&stream_, kernels::kCudaStreamNonBlocking), kOk);
    EXPECT_EQ(driver().MemAlloc(&gpu_, kBytes), kOk);
    EXPECT_EQ(driver().MemHostAlloc(&host_, kBytes, 0), kOk);
  }
  ~FakeGpuInVirtualTimeTest() override {
    fake_cuda::Memory& memory = process_->memory();  // the driver says nothing any more once there was a fault
    if (gpu_ != 0) memory.Free(gpu_);
    memory.FreeHost(host_);
    driver().StreamDestroy(stream_);
  }

  const CudaDriver& driver() const { return cuda_.device()->driver(); }

  static constexpr size_t kBytes = 4096;
  simulator::VirtualTime time_;
  fake_cuda::Memory memory_{Pcie, [] { return false; }};
  fake_cuda::Process* process_ = nullptr;
  simulator::SimulatedCuda cuda_{&time_,
                                 [this](simulator::Clock* clock) {
                                   auto process = std::make_unique<fake_cuda::Process>(clock, &memory_);
                                   process_ = process.get();
                                   return process;
                                 },
                                 [this](std::function<void()> event) { time_.After(0, std::move(event)); }};
  const kernels::CurrentDevice current_{*cuda_.device()};
  CudaStream stream_ = nullptr;
  kernels::CudaPointer gpu_ = 0;
  void* host_ = nullptr;
};

TEST_F(FakeGpuInVirtualTimeTest, CopiesGoThroughTheDriverOnly) {
  std::vector<std::byte> there(kBytes), back(kBytes);
  std::memset(host_, 7, kBytes);
  ASSERT_EQ(driver().MemcpyHtoDAsync(gpu_, host_, kBytes, stream_), kOk);
  time_.Run();
  EXPECT_EQ(static_cast<const char*>(process_->memory().OnGpu(reinterpret_cast<const void*>(gpu_), 1))[0], 7);
  EXPECT_DEATH(static_cast<void>(*reinterpret_cast<volatile char*>(gpu_)), "");
}

TEST_F(FakeGpuInVirtualTimeTest, ACopyOfMemoryThatIsFreedMeanwhileEndsEverything) {
  ASSERT_EQ(driver().MemcpyDtoHAsync(host_, gpu_, kBytes, stream_), kOk);
  ASSERT_EQ(driver().MemFree(gpu_), kOk);
  const kernels::CudaPointer freed = std::exchange(gpu_, 0);
  time_.Run();
  EXPECT_EQ(driver().MemcpyDtoHAsync(host_, freed, kBytes, stream_), kIllegalAddress);
  CudaEvent event = nullptr;
  EXPECT_EQ(driver().EventCreate(&event, 0), kIllegalAddress);
  kernels::CudaPointer reserved = 0;
  EXPECT_EQ(driver().MemAddressReserve(&reserved, size_t{2} << 20, 0, 0, 0), kIllegalAddress);
  int gpus = 0;
  EXPECT_EQ(driver().DeviceGetCount(&gpus), kIllegalAddress) << "nor does it answer";
}

TEST_F(FakeGpuInVirtualTimeTest, CopiesOfMemoryThatIsNotThereAreRefused) {
  EXPECT_EQ(driver().MemcpyDtoHAsync(host_, gpu_, kBytes + 1, stream_), kInvalidValue);
  EXPECT_EQ(driver().MemcpyDtoHAsync(static_cast<char*>(host_) + 1, gpu_, kBytes, stream_), kInvalidValue)
      << "in part not registered";
}

TEST_F(FakeGpuInVirtualTimeTest, WhatIsDestroyedIsNotUsed) {
  CudaStream gone = nullptr;
  ASSERT_EQ(driver().StreamCreate(&gone, 0), kOk);
  ASSERT_EQ(driver().StreamDestroy(gone), kOk);
  EXPECT_EQ(driver().StreamDestroy(gone), kInvalidHandle);
  EXPECT_EQ(driver().MemcpyHtoDAsync(gpu_, host_, kBytes, gone), kInvalidHandle);
  EXPECT_EQ(driver().StreamSynchronize(gone), kInvalidHandle);
  CudaEvent event = nullptr;
  ASSERT_EQ(driver().EventCreate(&event, 0), kOk);
  EXPECT_EQ(driver().EventRecord(event, gone), kInvalidHandle);
  ASSERT_EQ(driver().EventDestroy(event), kOk);
  EXPECT_EQ(driver().EventRecord(event, stream_), kInvalidHandle);
  EXPECT_EQ(driver().StreamWaitEvent(stream_, event, 0), kInvalidHandle);
  EXPECT_EQ(driver().EventDestroy(event), kInvalidHandle);
}

TEST_F(FakeGpuInVirtualTimeTest, WithoutAContextThereIsNoStreamEventOrMemory) {
  kernels::CudaContext context = nullptr;
  ASSERT_EQ(driver().CtxPopCurrent(&context), kOk);
  CudaStream stream = nullptr;
  CudaEvent event = nullptr;
  kernels::CudaPointer pointer = 0;
  EXPECT_EQ(driver().StreamCreate(&stream, 0), kInvalidContext);
  EXPECT_EQ(driver().EventCreate(&event, 0), kInvalidContext);
  EXPECT_EQ(driver().MemAlloc(&pointer, 1), kInvalidContext);
  EXPECT_EQ(driver().MemcpyHtoDAsync(gpu_, host_, kBytes, stream_), kInvalidContext);
  EXPECT_EQ(driver().CtxPushCurrent(reinterpret_cast<kernels::CudaContext>(1)), kInvalidContext);
  ASSERT_EQ(driver().CtxPushCurrent(context), kOk);
}

TEST_F(FakeGpuInVirtualTimeTest, LaunchesThatNoGpuCouldRunAreRefused) {
  kernels::CudaModule module = nullptr;
  kernels::CudaFunction pack = nullptr;
  ASSERT_EQ(driver().ModuleLoadData(&module, "an image"), kOk);
  EXPECT_EQ(driver().ModuleGetFunction(&pack, module, "superoffload_nothing"), kNotFound);
  ASSERT_EQ(driver().ModuleGetFunction(&pack, module, "superoffload_pack_bf16_to_bf16"), kOk);
  kernels::PackArguments arguments{};
  void* pointers[] = {&arguments};
  const auto launch = [&](unsigned threads, unsigned shared_bytes) {
    return driver().LaunchKernel(pack, 1, 1, 1, threads, 1, 1, shared_bytes, stream_, pointers, nullptr);
  };
  EXPECT_EQ(launch(2 * kernels::kPackThreads, 0), kOutOfResources);
  EXPECT_EQ(launch(kernels::kPackThreads, 48 << 10), kInvalidValue);
  ASSERT_EQ(launch(kernels::kPackThreads, 0), kOk);
  ASSERT_EQ(driver().ModuleUnload(module), kOk);
  time_.Run();
  EXPECT_EQ(launch(kernels::kPackThreads, 0), kIllegalAddress) << "it came to run without its module";
}

}  // namespace
}  // namespace superoffload
