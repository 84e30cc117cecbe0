// What the fake driver takes of the GPU's memory, and which host memory it copies without waiting.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <future>

#include "tests/support/fake_cuda/machine.h"
#include "tests/support/gpu_buffer.h"

namespace superoffload::kernels {
namespace {

using fake_cuda::kAlreadyRegistered;
using fake_cuda::kIllegalAddress;
using fake_cuda::kInvalidContext;
using fake_cuda::kInvalidValue;
using fake_cuda::kNotRegistered;
using fake_cuda::kOutOfMemory;

constexpr size_t kMiB = size_t{1} << 20, kPage = 4096;

class FakeCudaMemoryTest : public ::testing::Test {
 protected:
  size_t Free() const {
    size_t free_bytes = 0, total_bytes = 0;
    EXPECT_EQ(driver_.MemGetInfo(&free_bytes, &total_bytes), 0);
    return free_bytes;
  }
  int Register(size_t offset, size_t bytes) {
    return driver_.MemHostRegister(host_.bytes().data() + offset, bytes, kCudaHostRegisterPortable);
  }
  int Unregister(size_t offset) { return driver_.MemHostUnregister(host_.bytes().data() + offset); }
  int CopyDown(size_t offset, size_t bytes) {
    return driver_.MemcpyDtoHAsync(host_.bytes().data() + offset, gpu_.data(), bytes, stream_.get());
  }

  const std::shared_ptr<const GpuDevice> device_ = test::OpenGpu();
  const CudaDriver& driver_ = device_->driver();
  const CurrentDevice current_{*device_};
  test::HostPages host_{8 * kPage};
  test::GpuBuffer gpu_{device_, 8 * kPage};
  OwnedStream stream_;
};

TEST_F(FakeCudaMemoryTest, AContextTakesMemoryOfTheGpuOnce) {
  const test::FakeCudaSetting gpus("FAKE_CUDA_UUID", "0,7");
  CudaContext context = nullptr;
  {
    const test::FakeCudaSetting most("FAKE_CUDA_CONTEXT_MIB", "5000");
    EXPECT_EQ(driver_.DevicePrimaryCtxRetain(&context, 1), kOutOfMemory) << "the fixture has one";
  }
  const test::FakeCudaSetting some("FAKE_CUDA_CONTEXT_MIB", "300");
  const size_t before = Free();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(driver_.DevicePrimaryCtxRetain(&context, 1), 0);
  EXPECT_EQ(Free(), before - 300 * kMiB);
  CudaPointer memory = 0;
  EXPECT_EQ(driver_.MemAlloc(&memory, before), kOutOfMemory);
  EXPECT_EQ(driver_.DevicePrimaryCtxRelease(1), 0);
  EXPECT_EQ(Free(), before - 300 * kMiB) << "somebody uses it";
  EXPECT_EQ(driver_.DevicePrimaryCtxRelease(1), 0);
  EXPECT_EQ(Free(), before);
  EXPECT_EQ(driver_.DevicePrimaryCtxRelease(1), kInvalidContext);
}

TEST_F(FakeCudaMemoryTest, RegisteredPagesTakeMemoryOfTheGpu) {
  const size_t before = Free();
  {
    const test::FakeCudaSetting cost("FAKE_CUDA_REGISTER_COST", "1000");
    EXPECT_EQ(Register(100, 2 * kPage), 0);
    EXPECT_EQ(Free(), before - 3 * 1000) << "of three pages it has a part";
    void* allocated = nullptr;
    EXPECT_EQ(driver_.MemHostAlloc(&allocated, kPage, 0), 0);
    EXPECT_EQ(Free(), before - 4 * 1000);
    EXPECT_EQ(driver_.MemFreeHost(allocated), 0);
    EXPECT_EQ(Unregister(100), 0);
    EXPECT_EQ(Free(), before);
  }
  const test::FakeCudaSetting more("FAKE_CUDA_REGISTER_COST", "2000000000");
  EXPECT_EQ(Register(0, 8 * kPage), kOutOfMemory);
  const test::FakeCudaSetting coherent("FAKE_CUDA_MACHINE", "gh200");
  ::unsetenv("FAKE_CUDA_REGISTER_COST");
  EXPECT_EQ(Register(0, 8 * kPage), 0);
  EXPECT_EQ(Free(), before) << "it uses the host's page tables";
  EXPECT_EQ(Unregister(0), 0);
}

TEST_F(FakeCudaMemoryTest, APageIsRegisteredOnceAndUnregisteredAsItWas) {
  ASSERT_EQ(Register(kPage, 2 * kPage), 0);
  EXPECT_EQ(Register(kPage, 2 * kPage), kAlreadyRegistered);
  EXPECT_EQ(Register(0, kPage + 1), kAlreadyRegistered) << "its second page is";
  EXPECT_EQ(Register(3 * kPage - 1, 1), kAlreadyRegistered);
  EXPECT_EQ(Register(3 * kPage, kPage), 0);
  EXPECT_EQ(Unregister(2 * kPage), kNotRegistered) << "no base";
  EXPECT_EQ(driver_.MemFreeHost(host_.bytes().data() + kPage), kInvalidValue) << "the driver has not allocated it";
  EXPECT_EQ(Unregister(kPage), 0);
  EXPECT_EQ(Unregister(kPage), kNotRegistered);
  EXPECT_EQ(Unregister(3 * kPage), 0);
  void* allocated = nullptr;
  ASSERT_EQ(driver_.MemHostAlloc(&allocated, kPage, 0), 0);
  EXPECT_EQ(driver_.MemHostUnregister(allocated), kNotRegistered) << "nobody has registered it";
  EXPECT_EQ(driver_.MemFreeHost(allocated), 0);
}

TEST_F(FakeCudaMemoryTest, MemoryThatIsNotThereCannotBeRegistered) {
  void* const data = ::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_EQ(::munmap(static_cast<std::byte*>(data) + kPage, kPage), 0);
  EXPECT_EQ(driver_.MemHostRegister(data, 2 * kPage, 0), kInvalidValue);
  EXPECT_EQ(driver_.MemHostRegister(data, 0, 0), kInvalidValue);
  EXPECT_EQ(driver_.MemHostRegister(nullptr, kPage, 0), kInvalidValue);
  EXPECT_EQ(driver_.MemHostRegister(data, kPage, 0), 0);
  EXPECT_EQ(driver_.MemHostUnregister(data), 0);
  ::munmap(data, kPage);
}

// The stream does nothing until it is released, so what has arrived when the call returns tells whether it waited.
TEST_F(FakeCudaMemoryTest, ACopyWaitsOnceItsMemoryIsNoLongerRegistered) {
  auto* const pageable = test::OfFakeDriver<int()>("fakeCudaPageableCopies");
  auto* const issue = test::OfFakeDriver<int(CudaStream, void (*)(void*), void*)>("fakeCudaIssue");
  ASSERT_TRUE(MakeStream(*device_, &stream_).ok());
  std::memset(gpu_.At<std::byte>(0, kPage).data(), 9, kPage);
  gpu_.Upload();
  ASSERT_EQ(Register(0, kPage), 0);
  const int before = pageable();
  std::promise<void> held;
  issue(stream_.get(), [](void* promise) { static_cast<std::promise<void>*>(promise)->get_future().wait(); }, &held);
  EXPECT_EQ(CopyDown(0, kPage), 0);
  EXPECT_EQ(host_.bytes()[0], std::byte{0});
  held.set_value();
  EXPECT_EQ(driver_.StreamSynchronize(stream_.get()), 0);
  EXPECT_EQ(host_.bytes()[0], std::byte{9});
  EXPECT_EQ(pageable(), before);
  EXPECT_EQ(Unregister(0), 0);
  const test::FakeCudaSetting slow("FAKE_CUDA_SLOW", "DtoH=20000");
  host_.bytes()[0] = {};
  EXPECT_EQ(CopyDown(0, kPage), 0);
  EXPECT_EQ(host_.bytes()[0], std::byte{9}) << "the call has waited";
  EXPECT_EQ(pageable(), before + 1);
}

TEST_F(FakeCudaMemoryTest, NoCopyCrossesTheEndOfWhatIsRegistered) {
  ASSERT_TRUE(MakeStream(*device_, &stream_).ok());
  ASSERT_EQ(Register(kPage, kPage), 0);
  EXPECT_EQ(CopyDown(0, 2 * kPage), kInvalidValue);
  EXPECT_EQ(CopyDown(kPage, kPage + 1), kInvalidValue);
  EXPECT_EQ(CopyDown(0, kPage), 0);
  EXPECT_EQ(CopyDown(kPage, kPage), 0);
  EXPECT_EQ(driver_.StreamSynchronize(stream_.get()), 0);
  EXPECT_EQ(Unregister(kPage), 0);
}

// In a process of its own, which is of no use afterwards.
TEST_F(FakeCudaMemoryTest, MemoryThatIsUnregisteredUnderACopyIsAFault) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::setenv("FAKE_CUDA_SLOW", "DtoH=100000", 1);
        EXPECT_TRUE(MakeStream(*device_, &stream_).ok());
        EXPECT_EQ(Register(0, kPage), 0);
        for (int i = 0; i < 2; ++i) CopyDown(0, kPage);
        EXPECT_EQ(Unregister(0), 0);
        driver_.StreamSynchronize(stream_.get());
        std::_Exit(driver_.StreamSynchronize(stream_.get()) == kIllegalAddress ? 7 : 0);
      },
      ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace superoffload::kernels
