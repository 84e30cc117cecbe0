#include "server/optimizer/hosted_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "tests/unit/server/optimizer/fake_house.h"

namespace superoffload::optimizer {
namespace {

class HostedMemoryTest : public ::testing::Test {
 protected:
  // As a descriptor store gives them back.
  std::vector<memory::FileDescriptor> Descriptors() const {
    std::vector<memory::FileDescriptor> fds;
    for (const int fd : memory_.fds()) fds.emplace_back(::dup(fd));
    return fds;
  }

  FakeHouse house_;
  const OptimizerPtr optimizer_ = *house_.Create(1001, "model");  // with the description "description"
  const HostedMemory& memory_ = optimizer_->memory();
};

TEST_F(HostedMemoryTest, ASuccessorRecognisesThePartsInAnyOrder) {
  std::vector<memory::FileDescriptor> fds = Descriptors();
  std::swap(fds.front(), fds.back());
  const absl::StatusOr<HostedMemory> opened = HostedMemory::Open(fds);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(*opened->Description(), "description");
  EXPECT_EQ(opened->state.bytes(), memory_.state.bytes());
  EXPECT_EQ(opened->gradients.bytes(), memory_.gradients.bytes());
}

TEST_F(HostedMemoryTest, WhatIsIncompleteIsRefusedAndStaysTheCallers) {
  std::vector<memory::FileDescriptor> missing = Descriptors();
  missing.pop_back();
  EXPECT_EQ(HostedMemory::Open(missing).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(missing.size(), 4u);
  for (const memory::FileDescriptor& fd : missing) EXPECT_TRUE(fd.valid());
  std::vector<memory::FileDescriptor> twice = Descriptors();
  twice.emplace_back(::dup(memory_.state.fd()));
  EXPECT_EQ(HostedMemory::Open(twice).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(twice.size(), 6u);
}

TEST_F(HostedMemoryTest, ADescriptionIsReplaced) {
  for (const std::string text : {"second", "", "a third one"}) {
    ASSERT_TRUE(memory_.Describe(text).ok());
    EXPECT_EQ(*memory_.Description(), text);
  }
}

TEST_F(HostedMemoryTest, OfATornDescriptionTheOneBeforeCounts) {
  ASSERT_TRUE(memory_.Describe("second").ok());
  std::byte* const copies = memory_.description.data();
  const size_t half = memory_.description.bytes() / 2;
  copies[0] ^= std::byte{1};  // the second went to the first half
  EXPECT_EQ(*memory_.Description(), "description");
  copies[half] ^= std::byte{1};
  EXPECT_EQ(memory_.Description().status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(HostedMemoryTest, ADescriptionThatDoesNotFitIsRefusedAndTheOldOneStays) {
  EXPECT_EQ(memory_.Describe(std::string(100 << 10, 'x')).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*memory_.Description(), "description");
}

uint64_t HeldBytes(const engine::OptimizerSpec& spec) {
  uint64_t bytes = 0;
  for (const engine::ParameterSpec& parameter : spec.parameters) {
    const size_t numbers = parameter.shape.size() + parameter.global_shape.size() + parameter.global_offset.size();
    bytes += sizeof(parameter) + parameter.name.size() + numbers * sizeof(parameter.shape[0]);
  }
  return bytes;
}

TEST_F(HostedMemoryTest, ThePlanAndBothCopiesOfItsDescriptionAreCharged) {
  const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));  // the last one may be used in part
  EXPECT_GE(optimizer_->memory_use().metadata_bytes + page_bytes,
            HeldBytes(optimizer_->spec()) + memory_.description.bytes());
}

TEST_F(HostedMemoryTest, EveryDimensionIsChargedWhereverItIsKept) {
  constexpr uint64_t kMostBytesOfText = 10;  // protobuf's, of a number
  engine::OptimizerSpec spec = SmallSpec();
  const auto charged = [&] { return HostedMemory::Use(*engine::PlanLayout(spec), spec).metadata_bytes; };
  const uint64_t before = charged();
  engine::ParameterSpec& parameter = spec.parameters[0];
  const size_t held = HeldBytes(spec);
  parameter.shape.assign(64, 1);
  parameter.global_shape.assign(64, uint64_t{1} << 63);
  parameter.global_offset.assign(64, uint64_t{1} << 62);
  EXPECT_GE(charged() - before, HeldBytes(spec) - held + 2 * kMostBytesOfText * (3 * 64 - 1));
}

TEST_F(HostedMemoryTest, AShapeOfAsManyDimensionsAsATensorOfPyTorchIsTaken) {
  engine::OptimizerSpec spec = SmallSpec();
  spec.parameters[0].shape.assign(64, 1);
  EXPECT_TRUE(engine::PlanLayout(spec).ok());
}

}  // namespace
}  // namespace superoffload::optimizer
