// Weights that stream and never change. With the fake driver.
#include "client/src/gpu/frozen_units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "client/src/gpu/gpu_layout.h"
#include "tests/support/gpu_buffer.h"

namespace superoffload::client {
namespace {

using test::FakeCudaSetting;
using ::testing::HasSubstr;

constexpr uint32_t kUnits = 4;

class FrozenUnitsTest : public ::testing::Test {
 protected:
  FrozenUnitsTest() {
    for (uint32_t unit = 0; unit < kUnits; ++unit) sizes_.push_back(3000 + 1000 * unit);
    EXPECT_TRUE(kernels::PinnedMemory::Allocate(device_, sizes_.back(), &read_).ok());
    EXPECT_TRUE(kernels::MakeStream(*device_, &stream_).ok());
    Fill(1);
  }
  void Fill(int first) {
    uint64_t offset = 0;
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      std::memset(host_.data() + offset, first + static_cast<int>(unit), sizes_[unit]);
      offset += WholePages(sizes_[unit]);
    }
  }
  Status Open() { return FrozenUnits::Open(0, host_, sizes_, /*slots=*/2, &units_); }
  // The byte that all of the unit's are.
  int Read(uint32_t unit) {
    const Status status = units_->Read(unit, stream_.get());
    EXPECT_TRUE(status.ok()) << status.message;
    const kernels::CudaDriver& driver = device_->driver();
    EXPECT_EQ(driver.MemcpyDtoHAsync(read_.data(), units_->AddressOf(unit), sizes_[unit], stream_.get()), 0);
    EXPECT_EQ(driver.StreamSynchronize(stream_.get()), 0);
    const int first = static_cast<int>(read_.data()[0]);
    const auto is_first = [&](std::byte byte) { return static_cast<int>(byte) == first; };
    EXPECT_TRUE(std::all_of(read_.data(), read_.data() + sizes_[unit], is_first));
    return first;
  }
  uint32_t Has(uint32_t unit) {
    uint32_t has = 9;
    EXPECT_TRUE(units_->Has(unit, &has).ok());
    return has;
  }

  const std::shared_ptr<const kernels::GpuDevice> device_ = test::OpenGpu();
  const kernels::CurrentDevice current_{*device_};
  std::vector<std::byte> host_{kUnits * 8192};
  std::vector<uint64_t> sizes_;
  kernels::PinnedMemory read_;
  kernels::OwnedStream stream_;
  std::unique_ptr<FrozenUnits> units_;
};

TEST_F(FrozenUnitsTest, UnitsTakeTurns) {
  ASSERT_TRUE(Open().ok());
  for (const uint32_t unit : {0u, 1u, 2u, 3u, 3u, 2u, 1u, 0u, 2u}) EXPECT_EQ(Read(unit), 1 + static_cast<int>(unit));
  EXPECT_EQ(Has(2), 1u);
  EXPECT_EQ(Has(0), 0u) << "2 has its slot";
}

TEST_F(FrozenUnitsTest, ThoseThatAreKeptStay) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(units_->Keep(std::vector<uint32_t>{0, 2}).ok());
  EXPECT_EQ(Has(2), 2u);
  for (const uint32_t unit : {3u, 1u, 2u, 0u}) EXPECT_EQ(Read(unit), 1 + static_cast<int>(unit));
  EXPECT_EQ(Has(0), 2u);
  Fill(11);
  ASSERT_TRUE(units_->Keep(std::vector<uint32_t>{0}).ok()) << "what the host has now is read from now on";
  for (const uint32_t unit : {3u, 1u, 2u, 0u}) EXPECT_EQ(Read(unit), 11 + static_cast<int>(unit));
}

TEST_F(FrozenUnitsTest, WithoutMemoryForThoseThatAreKeptAllIsAsBefore) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(units_->Keep(std::vector<uint32_t>{1}).ok());
  {
    const FakeCudaSetting oom("FAKE_CUDA_OOM", "1");
    EXPECT_EQ(units_->Keep(std::vector<uint32_t>{0, 1, 2}).code, Code::kResourceExhausted);
  }
  EXPECT_EQ(Has(1), 2u);
  for (const uint32_t unit : {3u, 1u, 2u, 0u}) EXPECT_EQ(Read(unit), 1 + static_cast<int>(unit));
}

TEST_F(FrozenUnitsTest, BadInputIsRefused) {
  const auto refused = [&](Code code, const char* says) {
    const Status status = Open();
    EXPECT_EQ(status.code, code);
    EXPECT_THAT(status.message, HasSubstr(says));
    EXPECT_EQ(units_, nullptr);
  };
  {
    const FakeCudaSetting oom("FAKE_CUDA_OOM", "1");
    refused(Code::kResourceExhausted, "memory");
  }
  {
    const FakeCudaSetting fail("FAKE_CUDA_FAIL", "cuMemHostRegister_v2=2");
    refused(Code::kResourceExhausted, "RLIMIT_MEMLOCK");
  }
  sizes_.back() = 16384 + 1;
  refused(Code::kInvalidArgument, "do not lie in host memory of 32768");
  sizes_ = {0};
  refused(Code::kInvalidArgument, "units of 0 bytes");
  sizes_.clear();
  refused(Code::kInvalidArgument, "give at least one of each");
}

TEST_F(FrozenUnitsTest, ThereIsNoUnitBehindTheLast) {
  ASSERT_TRUE(Open().ok());
  uint32_t has = 0;
  EXPECT_EQ(units_->Read(kUnits, stream_.get()).code, Code::kInvalidArgument);
  EXPECT_EQ(units_->Has(kUnits, &has).code, Code::kInvalidArgument);
  EXPECT_EQ(units_->Keep(std::vector<uint32_t>{kUnits}).code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace superoffload::client
