// GPU memory for unit tests, and pinned host memory of the same size beside it. With the fake driver.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_GPU_BUFFER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_GPU_BUFFER_H_

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/pinned_memory.h"
#include "kernels/gpu/shared_gpu_memory.h"

namespace superoffload::test {

// A function of the fake driver.
template <typename Function>
Function* OfFakeDriver(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(::dlopen("libcuda.so.1", RTLD_NOW), name));
}

// One setting of the fake driver (tests/support/fake_cuda/machine.h), while it lives.
class FakeCudaSetting {
 public:
  FakeCudaSetting(const char* variable, const char* value) : variable_(variable) { ::setenv(variable, value, 1); }
  ~FakeCudaSetting() { ::unsetenv(variable_); }

 private:
  const char* const variable_;
};

inline std::shared_ptr<const kernels::GpuDevice> OpenGpu() {
  std::shared_ptr<const kernels::GpuDevice> device;
  const kernels::CudaStatus status = kernels::GpuDevice::Open(0, &device);
  EXPECT_TRUE(status.ok()) << status.message;
  return device;
}

// Starts as zeros.
class GpuBuffer {
 public:
  GpuBuffer(std::shared_ptr<const kernels::GpuDevice> device, size_t bytes)
      : device_(std::move(device)), bytes_(bytes) {
    const kernels::CurrentDevice current(*device_);
    EXPECT_TRUE(kernels::SharedGpuMemory::Allocate(device_, bytes, &memory_).ok());
    EXPECT_TRUE(kernels::PinnedMemory::Allocate(device_, bytes, &host_).ok());
    EXPECT_TRUE(kernels::MakeStream(*device_, &stream_).ok());
    std::memset(host_.data(), 0, bytes);
    Upload();
  }
  ~GpuBuffer() {
    const kernels::CurrentDevice current(*device_);
    stream_ = {};
  }

  kernels::CudaPointer data() const { return memory_->data(); }
  // Host memory that stands for the GPU's at `offset`, of `count` elements.
  template <typename T>
  std::span<T> At(size_t offset, size_t count) const {
    return {reinterpret_cast<T*>(host_.data() + offset), count};
  }
  void Upload() {
    const kernels::CurrentDevice current(*device_);
    EXPECT_EQ(device_->driver().MemcpyHtoDAsync(data(), host_.data(), bytes_, stream_.get()), 0);
    EXPECT_EQ(device_->driver().StreamSynchronize(stream_.get()), 0);
  }
  void Download() {
    const kernels::CurrentDevice current(*device_);
    EXPECT_EQ(device_->driver().MemcpyDtoHAsync(host_.data(), data(), bytes_, stream_.get()), 0);
    EXPECT_EQ(device_->driver().StreamSynchronize(stream_.get()), 0);
  }

 private:
  const std::shared_ptr<const kernels::GpuDevice> device_;
  const size_t bytes_;
  std::unique_ptr<kernels::SharedGpuMemory> memory_;
  kernels::PinnedMemory host_;
  kernels::OwnedStream stream_;
};

// Host memory on pages of its own, which can be registered.
class HostPages {
 public:
  explicit HostPages(size_t bytes) : pages_((bytes + sizeof(Page) - 1) / sizeof(Page)), bytes_(bytes) {}
  std::span<std::byte> bytes() { return {pages_[0].bytes, bytes_}; }

 private:
  struct alignas(4096) Page {
    std::byte bytes[4096] = {};
  };
  std::vector<Page> pages_;
  const size_t bytes_;
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_GPU_BUFFER_H_
