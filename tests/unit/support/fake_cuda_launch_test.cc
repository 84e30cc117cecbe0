// What the fake driver does with launches that no GPU could run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/kernels.cuh"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/gpu_buffer.h"

namespace superoffload::kernels {
namespace {

using fake_cuda::kIllegalAddress;
using fake_cuda::kInvalidHandle;
using fake_cuda::kInvalidValue;
using fake_cuda::kNotFound;
using fake_cuda::kOutOfResources;

constexpr unsigned kPackLeft = (48 << 10) - kPackSharedBytes;  // for dynamic shared memory, unless asked for more
constexpr char kPack[] = "superoffload_pack_bf16_to_bf16";

struct Shape {
  unsigned grid[3] = {1, 1, 1}, block[3] = {kPackThreads, 1, 1};
  unsigned shared_bytes = 0;
};

class FakeCudaLaunchTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = kPackRows * kChunkElements;
  static constexpr uint64_t kBytes = kElements * sizeof(uint16_t);

  FakeCudaLaunchTest() {
    EXPECT_TRUE(MakeStream(*device_, &stream_).ok());
    Load(&module_, &pack_);
  }

  void Load(CudaModule* module, CudaFunction* function) {
    ASSERT_EQ(driver_.ModuleLoadData(module, "an image"), 0);
    ASSERT_EQ(driver_.ModuleGetFunction(function, *module, kPack), 0);
  }

  // Packs nothing but zeros.
  int Issue(CudaFunction function, const Shape& shape) {
    PackArguments arguments{.table = {},
                            .dtype = DType::kBFloat16,
                            .slot = {reinterpret_cast<void*>(gpu_.data()), DType::kBFloat16},
                            .elements = kElements,
                            .chunk_sums = reinterpret_cast<double*>(gpu_.data() + kBytes)};
    void* pointers[] = {&arguments};
    return driver_.LaunchKernel(function, shape.grid[0], shape.grid[1], shape.grid[2], shape.block[0], shape.block[1],
                                shape.block[2], shape.shared_bytes, stream_.get(), pointers, nullptr);
  }
  int Launch(CudaFunction function, const Shape& shape) {
    const int result = Issue(function, shape);
    EXPECT_EQ(driver_.StreamSynchronize(stream_.get()), 0);
    return result;
  }

  std::shared_ptr<const GpuDevice> device_ = test::OpenGpu();
  const CudaDriver& driver_ = device_->driver();
  const CurrentDevice current_{*device_};
  test::GpuBuffer gpu_{device_, kBytes + kPackRows * sizeof(double)};
  OwnedStream stream_;
  CudaModule module_ = nullptr;
  CudaFunction pack_ = nullptr;
};

TEST_F(FakeCudaLaunchTest, DimensionsThatNoGpuHasAreRefused) {
  EXPECT_EQ(Launch(pack_, {}), 0);
  EXPECT_EQ(Launch(pack_, {.grid = {0x7fffffff, 1, 1}, .block = {kPackThreads, 5, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.grid = {0, 1, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.grid = {0x80000000, 1, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.grid = {1, 0, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.grid = {1, 0x10000, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.block = {0, 1, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.block = {1025, 1, 1}}), kInvalidValue);
  EXPECT_EQ(Launch(pack_, {.block = {1, 1, 65}}), kInvalidValue);
}

TEST_F(FakeCudaLaunchTest, ABlockHasNoMoreThreadsThanItsKernelWasCompiledFor) {
  EXPECT_EQ(Launch(pack_, {.block = {2 * kPackThreads, 1, 1}}), kOutOfResources);
  CudaFunction resident = nullptr, product = nullptr;
  ASSERT_EQ(driver_.ModuleGetFunction(&resident, module_, "superoffload_resident_adam"), 0);
  ASSERT_EQ(driver_.ModuleGetFunction(&product, module_, "superoffload_product"), 0);
  EXPECT_EQ(Launch(resident, {.block = {kResidentThreads + 1, 1, 1}}), kOutOfResources);
  EXPECT_EQ(Launch(product, {.block = {kProductTile * kProductTile + 1, 1, 1}}), kOutOfResources);
}

TEST_F(FakeCudaLaunchTest, ABlockOfTooFewThreadsDoesNotPackEverything) {
  for (const unsigned threads : {kPackThreads / 2, kPackThreads}) {
    std::ranges::fill(gpu_.At<uint16_t>(0, kElements), uint16_t{0xffff});
    gpu_.Upload();
    ASSERT_EQ(Launch(pack_, {.block = {threads, 1, 1}}), 0);
    gpu_.Download();
    const auto left = std::ranges::count(gpu_.At<uint16_t>(0, kElements), uint16_t{0xffff});
    EXPECT_EQ(left, threads == kPackThreads ? 0 : kElements / 2);
  }
}

TEST_F(FakeCudaLaunchTest, SharedMemoryBeyond48KibIsAskedForPerFunction) {
  EXPECT_EQ(Launch(pack_, {.shared_bytes = kPackLeft}), 0);
  EXPECT_EQ(Launch(pack_, {.shared_bytes = kPackLeft + 1}), kInvalidValue) << "what the code declares counts";
  CudaModule other_module = nullptr;
  CudaFunction other = nullptr;
  Load(&other_module, &other);
  const auto allow = [&](unsigned bytes) {
    return driver_.FuncSetAttribute(pack_, kCudaFunctionDynamicSharedBytes, static_cast<int>(bytes));
  };
  constexpr unsigned kMost = (227 << 10) - kPackSharedBytes;
  EXPECT_EQ(allow(kMost + 1), kInvalidValue);
  EXPECT_EQ(allow(kMost), 0);
  EXPECT_EQ(Launch(pack_, {.shared_bytes = kMost}), 0);
  EXPECT_EQ(Launch(other, {.shared_bytes = kPackLeft + 1}), kInvalidValue) << "of another module";
  EXPECT_EQ(allow(1 << 10), 0);
  EXPECT_EQ(Launch(pack_, {.shared_bytes = kPackLeft}), kInvalidValue) << "it was granted less";
  EXPECT_EQ(driver_.ModuleUnload(other_module), 0);
}

TEST_F(FakeCudaLaunchTest, WhatWasUnloadedIsGone) {
  CudaFunction none = nullptr;
  EXPECT_EQ(driver_.ModuleGetFunction(&none, module_, "superoffload_nothing"), kNotFound);
  EXPECT_EQ(driver_.ModuleUnload(module_), 0);
  EXPECT_EQ(driver_.ModuleUnload(module_), kInvalidHandle);
  EXPECT_EQ(driver_.ModuleGetFunction(&none, module_, kPack), kInvalidHandle);
  EXPECT_EQ(driver_.FuncSetAttribute(pack_, kCudaFunctionDynamicSharedBytes, 0), kInvalidHandle);
  EXPECT_EQ(Launch(pack_, {}), kInvalidHandle);
}

// In a process of its own, which is of no use afterwards.
TEST_F(FakeCudaLaunchTest, AKernelWhoseModuleIsUnloadedBeforeItRunsIsAFault) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::setenv("FAKE_CUDA_DELAY", "100000", 1);
        EXPECT_TRUE(MakeStream(*device_, &stream_).ok());
        for (int i = 0; i < 20; ++i) Issue(pack_, {});
        driver_.ModuleUnload(module_);
        driver_.StreamSynchronize(stream_.get());
        std::_Exit(driver_.StreamSynchronize(stream_.get()) == kIllegalAddress ? 7 : 0);
      },
      ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace superoffload::kernels
