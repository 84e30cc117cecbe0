// Addresses that get their memory piece by piece, and what of it another process can map. With the fake driver, which
// counts.
#include "kernels/gpu/shared_gpu_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/gpu_buffer.h"

namespace superoffload::kernels {
namespace {

using test::FakeCudaSetting;
using test::OfFakeDriver;

constexpr uint64_t kMiB = 1 << 20, kPieceBytes = 8 * kMiB, kSharedBytes = 3 * kPieceBytes + kMiB;
constexpr int kResourceExhausted = 8, kFailedPrecondition = 9;

class SharedGpuMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<SharedGpuMemory> Reserve(Export exports, uint64_t bytes = kSharedBytes) {
    std::unique_ptr<SharedGpuMemory> memory;
    const CudaStatus status = SharedGpuMemory::Reserve(device_, bytes, /*most_pieces=*/128, exports, {}, &memory);
    EXPECT_TRUE(status.ok()) << status.message;
    return memory;
  }
  // Beyond the context.
  size_t used() const { return all_used() - before_; }
  int objects() const { return OfFakeDriver<int()>("fakeCudaObjects")(); }

  const std::shared_ptr<const GpuDevice> device_ = test::OpenGpu();
  const CurrentDevice current_{*device_};

 private:
  static size_t all_used() { return OfFakeDriver<size_t()>("fakeCudaUsedBytes")(); }

  const size_t before_ = all_used();
};

TEST_F(SharedGpuMemoryTest, ReservingTakesNoMemoryAndBackingAsManyPiecesAsAreAskedFor) {
  const int before = objects();
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kNever);
  EXPECT_EQ(memory->bytes(), kSharedBytes + kMiB) << "whole granules";
  EXPECT_EQ(memory->piece_bytes(), kPieceBytes);
  EXPECT_EQ(used(), 0u);
  for (const uint64_t end : {uint64_t{1}, kPieceBytes, kPieceBytes + 1, kSharedBytes, memory->bytes()}) {
    ASSERT_TRUE(memory->Back(end).ok());
    EXPECT_GE(memory->backed_bytes(), end);
    EXPECT_LT(memory->backed_bytes(), end + kPieceBytes);
    EXPECT_EQ(used(), memory->backed_bytes());
  }
  memory.reset();
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(objects(), before);
}

TEST_F(SharedGpuMemoryTest, ThereAreNeverMorePiecesThanASocketCarries) {
  const std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kAsDescriptors, uint64_t{3} << 30);
  EXPECT_LE((memory->bytes() + memory->piece_bytes() - 1) / memory->piece_bytes(), 128u);
}

TEST_F(SharedGpuMemoryTest, MemoryThatRunsOutLeavesWhatThereIs) {
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kNever);
  ASSERT_TRUE(memory->Back(1).ok());
  {
    const FakeCudaSetting oom("FAKE_CUDA_OOM", "2");
    EXPECT_EQ(memory->Back(kSharedBytes).code, kResourceExhausted);
  }
  EXPECT_EQ(memory->backed_bytes(), 2 * kPieceBytes);
  EXPECT_TRUE(memory->Back(kSharedBytes).ok());
}

TEST_F(SharedGpuMemoryTest, APieceIsGivenBackOnceWhatUsesItIsDone) {
  const int before = objects();
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kNever);
  ASSERT_TRUE(memory->Back(memory->bytes()).ok());
  {
    const FakeCudaSetting delay("FAKE_CUDA_DELAY", "100000");
    PinnedMemory host;  // else copies wait
    ASSERT_TRUE(PinnedMemory::Allocate(device_, 4096, &host).ok());
    CudaStream stream = nullptr;
    const CudaDriver& driver = device_->driver();
    ASSERT_EQ(driver.StreamCreate(&stream, kCudaStreamNonBlocking), 0);
    for (int i = 0; i < 5; ++i) {
      ASSERT_EQ(driver.MemcpyHtoDAsync(memory->data() + kPieceBytes, host.data(), 4096, stream), 0);
    }
    ASSERT_TRUE(memory->GiveBack(1, stream).ok());
    EXPECT_EQ(driver.StreamSynchronize(stream), 0) << "the copies were done before";
    EXPECT_EQ(driver.StreamDestroy(stream), 0);
  }
  EXPECT_EQ(used(), memory->bytes() - kPieceBytes);
  EXPECT_TRUE(memory->GiveBack(1, nullptr).ok()) << "it is";
  EXPECT_TRUE(memory->GiveBack(1000, nullptr).ok()) << "there is none";
  ASSERT_TRUE(memory->GiveBack(3, nullptr).ok());
  EXPECT_EQ(used(), 2 * kPieceBytes) << "the last one is shorter";
  memory.reset();
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(objects(), before);
}

TEST_F(SharedGpuMemoryTest, ACaptureOutlivesWhatIsGivenBack) {
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kNever);
  ASSERT_TRUE(memory->Back(memory->bytes()).ok());
  OwnedStream computes, captured;
  ASSERT_TRUE(MakeStream(*device_, &computes).ok());
  ASSERT_TRUE(MakeStream(*device_, &captured).ok());
  constexpr int kGlobal = 0;
  ASSERT_EQ(test::OfFakeDriver<int(CudaStream, int)>("cuStreamBeginCapture_v2")(captured.get(), kGlobal), 0);
  {
    const CurrentDevice ours(*device_);
    EXPECT_TRUE(memory->GiveBack(0, computes.get()).ok());
    EXPECT_EQ(memory->GiveBack(1, captured.get()).code, kFailedPrecondition) << "nobody knows when its graph runs";
  }
  EXPECT_EQ(used(), memory->bytes() - kPieceBytes);
  void* graph = nullptr;
  EXPECT_EQ(test::OfFakeDriver<int(CudaStream, void**)>("cuStreamEndCapture")(captured.get(), &graph), 0);
  EXPECT_TRUE(memory->GiveBack(1, captured.get()).ok());
  EXPECT_EQ(used(), memory->bytes() - 2 * kPieceBytes);
}

TEST_F(SharedGpuMemoryTest, TheImporterFindsThePiecesOneBehindTheOther) {
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kAsDescriptors);
  ASSERT_TRUE(memory->Back(memory->bytes()).ok());
  std::vector<int> descriptors;
  ASSERT_TRUE(memory->ExportTo(&descriptors).ok());
  EXPECT_EQ(descriptors.size(), 4u);
  std::unique_ptr<SharedGpuMemory> imported;
  const CudaStatus status =
      SharedGpuMemory::Import(device_, memory->bytes(), memory->piece_bytes(), descriptors, &imported);
  ASSERT_TRUE(status.ok()) << status.message;
  for (const int descriptor : descriptors) ::close(descriptor);
  OwnedStream stream;
  ASSERT_TRUE(MakeStream(*device_, &stream).ok());
  PinnedMemory host;
  ASSERT_TRUE(PinnedMemory::Allocate(device_, memory->bytes(), &host).ok());
  for (uint64_t i = 0; i < memory->bytes(); i += 1024) host.data()[i] = static_cast<std::byte>(i / kMiB + 1);
  const CudaDriver& driver = device_->driver();
  // One copy over all pieces, and back from the other mapping.
  ASSERT_EQ(driver.MemcpyHtoDAsync(memory->data(), host.data(), memory->bytes(), stream.get()), 0);
  ASSERT_EQ(driver.StreamSynchronize(stream.get()), 0);
  std::memset(host.data(), 0, memory->bytes());
  ASSERT_EQ(driver.MemcpyDtoHAsync(host.data(), imported->data(), memory->bytes(), stream.get()), 0);
  ASSERT_EQ(driver.StreamSynchronize(stream.get()), 0);
  for (uint64_t i = 0; i < memory->bytes(); i += 1024) ASSERT_EQ(host.data()[i], static_cast<std::byte>(i / kMiB + 1));
  memory.reset();
  EXPECT_FALSE(imported->exportable());
}

// A framework that has enabled peers believes that they reach everything; memory of this kind they do not reach by
// that.
TEST_F(SharedGpuMemoryTest, OtherGpusReachItFromWhenTheProcessUsesThem) {
  const auto accessors = [](const SharedGpuMemory& memory, uint64_t piece) {
    return OfFakeDriver<int(uint64_t)>("fakeCudaAccessors")(memory.data() + piece * kPieceBytes);
  };
  const FakeCudaSetting gpus("FAKE_CUDA_UUID", "0,7,3");
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kNever);
  ASSERT_TRUE(memory->Back(2 * kPieceBytes).ok());
  ASSERT_TRUE(memory->OpenToPeers().ok());
  EXPECT_EQ(accessors(*memory, 1), 1) << "of two GPUs that the process only sees";
  std::shared_ptr<const GpuDevice> second, third;
  ASSERT_TRUE(GpuDevice::Open(1, &second).ok());
  ASSERT_TRUE(memory->GiveBack(0, nullptr).ok());
  ASSERT_TRUE(memory->OpenToPeers().ok());
  EXPECT_EQ(accessors(*memory, 1), 2);
  ASSERT_TRUE(memory->Back(kSharedBytes).ok());
  EXPECT_EQ(accessors(*memory, 2), 2) << "what is backed afterwards";
  ASSERT_TRUE(GpuDevice::Open(2, &third).ok());
  {
    const FakeCudaSetting fails("FAKE_CUDA_FAIL", "cuMemSetAccess=999");
    EXPECT_FALSE(memory->OpenToPeers().ok());
  }
  ASSERT_TRUE(memory->OpenToPeers().ok()) << "once more";
  for (const uint64_t piece : {1, 2, 3}) EXPECT_EQ(accessors(*memory, piece), 3);
}

TEST_F(SharedGpuMemoryTest, GpusThatCannotReachItGetNoMapping) {
  const FakeCudaSetting gpus("FAKE_CUDA_UUID", "0,7");
  const FakeCudaSetting apart("FAKE_CUDA_NO_PEERS", "1");
  std::shared_ptr<const GpuDevice> second;
  ASSERT_TRUE(GpuDevice::Open(1, &second).ok());
  std::unique_ptr<SharedGpuMemory> memory = Reserve(Export::kNever);
  ASSERT_TRUE(memory->Back(kPieceBytes).ok());
  ASSERT_TRUE(memory->OpenToPeers().ok());
  EXPECT_EQ(OfFakeDriver<int(uint64_t)>("fakeCudaAccessors")(memory->data()), 1);
}

}  // namespace
}  // namespace superoffload::kernels
