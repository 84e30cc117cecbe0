// Which memory is behind the addresses of units. With the fake driver, which counts.
#include "kernels/gpu/unit_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/gpu_buffer.h"

namespace superoffload::kernels {
namespace {

using test::FakeCudaSetting;
using test::OfFakeDriver;

constexpr uint32_t kUnits = 5;
constexpr uint64_t kUnitBytes = 2 * kUnitGranule;

TEST(SlotsOfTest, UnitsThatStayHaveOneForThemselves) {
  using Slots = std::vector<uint32_t>;
  EXPECT_EQ(SlotsOf({false, false, false, false}, 3), (Slots{0, 1, 2, 0}));
  EXPECT_EQ(SlotsOf({false, true, false, false, true}, 2), (Slots{0, 2, 1, 0, 3}));
  EXPECT_EQ(SlotsOf({true, false, true}, 2), (Slots{1, 0, 2})) << "no slot is left over";
  EXPECT_EQ(SlotsOf({true, true}, 3), (Slots{0, 1}));
  EXPECT_TRUE(SlotsOf({}, 3).empty());
}

class UnitMemoryTest : public ::testing::Test {
 protected:
  UnitMemoryTest() {
    const UnitRanges units{.offset = 4 * kUnitGranule, .bytes = kUnitBytes, .count = kUnits};
    const CudaStatus status = SharedGpuMemory::Reserve(device_, 2 * kUnitGranule, /*most_pieces=*/128,
                                                       Export::kAsDescriptors, units, &memory_);
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_TRUE(PinnedMemory::Allocate(device_, kUnitBytes, &host_).ok());
    EXPECT_TRUE(MakeStream(*device_, &stream_).ok());
    before_ = OfFakeDriver<size_t()>("fakeCudaUsedBytes")();
  }
  UnitMemory& units() { return *memory_->units(); }
  size_t used() const { return OfFakeDriver<size_t()>("fakeCudaUsedBytes")() - before_; }
  CudaPointer AddressOf(uint32_t unit) const { return memory_->data() + 4 * kUnitGranule + unit * kUnitBytes; }
  void Write(uint32_t unit, int byte) {
    std::memset(host_.data(), byte, kUnitBytes);
    EXPECT_EQ(device_->driver().MemcpyHtoDAsync(AddressOf(unit), host_.data(), kUnitBytes, stream_.get()), 0);
    EXPECT_EQ(device_->driver().StreamSynchronize(stream_.get()), 0);
  }
  int Read(uint32_t unit) {
    EXPECT_EQ(device_->driver().MemcpyDtoHAsync(host_.data(), AddressOf(unit), kUnitBytes, stream_.get()), 0);
    EXPECT_EQ(device_->driver().StreamSynchronize(stream_.get()), 0);
    return static_cast<int>(host_.data()[kUnitBytes - 1]);
  }

  const std::shared_ptr<const GpuDevice> device_ = test::OpenGpu();
  const CurrentDevice current_{*device_};
  std::unique_ptr<SharedGpuMemory> memory_;
  PinnedMemory host_;
  OwnedStream stream_;
  size_t before_ = 0;
};

TEST_F(UnitMemoryTest, UnitsOfOneSlotHaveTheSameMemory) {
  EXPECT_EQ(used(), 0u);
  ASSERT_TRUE(units().Map({0, 1, 0, 1, 2}).ok());
  EXPECT_EQ(used(), 3 * kUnitBytes);
  EXPECT_EQ(units().bytes(), 3 * kUnitBytes);
  Write(0, 7);
  Write(1, 8);
  Write(4, 9);
  EXPECT_EQ(Read(2), 7);
  EXPECT_EQ(Read(3), 8);
  EXPECT_EQ(Read(4), 9);
  Write(2, 5);
  EXPECT_EQ(Read(0), 5);
}

TEST_F(UnitMemoryTest, ThereAreAsManySlotsAsUnitsNeed) {
  const int before = OfFakeDriver<int()>("fakeCudaObjects")();
  ASSERT_TRUE(units().Map({0, 0, 0, 0, 0}).ok());
  EXPECT_EQ(used(), kUnitBytes);
  ASSERT_TRUE(units().Map({0, 1, 2, 3, 4}).ok());
  EXPECT_EQ(used(), kUnits * kUnitBytes);
  Write(0, 1);
  Write(4, 2);
  EXPECT_EQ(Read(0), 1);
  ASSERT_TRUE(units().Map({1, 0, 1, 0, 1}).ok());
  EXPECT_EQ(used(), 2 * kUnitBytes);
  Write(4, 3);
  EXPECT_EQ(Read(0), 3);
  ASSERT_TRUE(memory_->GiveUnitsBack(stream_.get()).ok());
  EXPECT_EQ(used(), 0u);
  EXPECT_TRUE(units().slots().empty());
  EXPECT_EQ(OfFakeDriver<int()>("fakeCudaObjects")(), before);
  ASSERT_TRUE(memory_->GiveUnitsBack(stream_.get()).ok()) << "nothing is left";
  ASSERT_TRUE(units().Map({0, 1, 0, 1, 0}).ok());
  memory_.reset();
  EXPECT_EQ(used(), 0u);
}

TEST_F(UnitMemoryTest, AllIsGivenBackAndComesAgain) {
  const int before = OfFakeDriver<int()>("fakeCudaObjects")();
  for (int round = 0; round < 2; ++round) {
    ASSERT_TRUE(memory_->Back(memory_->bytes()).ok());
    ASSERT_TRUE(units().Map({0, 1, 0, 1, 2}).ok());
    EXPECT_EQ(used(), memory_->bytes() + 3 * kUnitBytes);
    Write(4, 3 + round);
    EXPECT_EQ(Read(4), 3 + round);
    ASSERT_TRUE(memory_->GiveAllBack(stream_.get()).ok());
    EXPECT_EQ(memory_->backed_bytes(), 0u);
    EXPECT_EQ(used(), 0u);
  }
  ASSERT_TRUE(memory_->GiveAllBack(stream_.get()).ok()) << "nothing is left";
  EXPECT_EQ(OfFakeDriver<int()>("fakeCudaObjects")(), before);
}

TEST_F(UnitMemoryTest, PlainMemoryStays) {
  std::unique_ptr<SharedGpuMemory> plain;
  ASSERT_TRUE(SharedGpuMemory::Allocate(device_, 1, &plain).ok());
  constexpr int kUnimplemented = 12;
  EXPECT_EQ(plain->GiveAllBack(stream_.get()).code, kUnimplemented);
  EXPECT_GT(plain->backed_bytes(), 0u);
}

TEST_F(UnitMemoryTest, WithoutMemoryForMoreSlotsAllIsAsBefore) {
  ASSERT_TRUE(units().Map({0, 1, 0, 1, 0}).ok());
  Write(3, 6);
  for (const char* const allocation : {"1", "3"}) {
    const FakeCudaSetting oom("FAKE_CUDA_OOM", allocation);
    constexpr int kResourceExhausted = 8;
    EXPECT_EQ(units().Map({0, 1, 2, 3, 4}).code, kResourceExhausted);
    EXPECT_EQ(units().slots(), (std::vector<uint32_t>{0, 1, 0, 1, 0}));
    EXPECT_EQ(used(), 2 * kUnitBytes);
    EXPECT_EQ(Read(1), 6);
  }
  EXPECT_TRUE(units().Map({0, 1, 2, 3, 4}).ok());
}

}  // namespace
}  // namespace superoffload::kernels
