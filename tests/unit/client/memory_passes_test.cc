#include "client/src/memory_passes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace superoffload::client {
namespace {

class MemoryPassesTest : public testing::Test {
 protected:
  MemoryPassesTest() {
    std::mt19937_64 random(5);
    for (const size_t bytes : {size_t{0}, size_t{3}, size_t{4096}, size_t{300'000}, size_t{5'000'001}}) {
      std::vector<unsigned char>& from = from_.emplace_back(bytes);
      for (unsigned char& byte : from) byte = static_cast<unsigned char>(random());
      to_.emplace_back(bytes);
      ranges_.push_back({from.data(), to_.back().data(), bytes});
    }
  }

  std::vector<uint64_t> Digests(size_t threads, bool copy) {
    std::vector<superoffload_range> ranges = ranges_;
    if (!copy) {
      for (superoffload_range& range : ranges) range.to = nullptr;
    }
    std::vector<uint64_t> digests(ranges.size());
    EXPECT_EQ(superoffload_copy_and_digest(ranges.data(), ranges.size(), threads, digests.data()), 0);
    return digests;
  }

  size_t Difference() { return FindDifference(ranges_, 3); }

  std::vector<std::vector<unsigned char>> from_, to_;
  std::vector<superoffload_range> ranges_;
};

TEST_F(MemoryPassesTest, AnyNumberOfThreadsCopiesAllAndGivesTheSameDigests) {
  const std::vector<uint64_t> expected = Digests(1, false);
  EXPECT_NE(to_, from_);
  EXPECT_EQ(Digests(3, true), expected);
  EXPECT_EQ(to_, from_);
  EXPECT_EQ(Digests(4, false), expected);
  std::swap_ranges(from_[4].begin(), from_[4].begin() + (256 << 10), from_[4].begin() + (256 << 10));
  EXPECT_NE(Digests(3, false)[4], expected[4]) << "two pieces in each other's place";
}

TEST_F(MemoryPassesTest, FindsTheRunThatDiffers) {
  Digests(2, true);
  EXPECT_EQ(Difference(), ranges_.size());
  to_[4][4'999'999] ^= 1;
  EXPECT_EQ(Difference(), 4u);
}

TEST_F(MemoryPassesTest, SamplesSeeWhatIsLongInEveryTurnAndALineInOneOfThem) {
  constexpr size_t kTurns = kSampleEveryBytes / 64;
  Digests(2, true);
  EXPECT_EQ(FindDifferenceInSamples(ranges_, 3, 12'345), ranges_.size());
  for (size_t i = 4'000'000; i < 4'000'000 + kSampleEveryBytes; ++i) to_[4][i] ^= 1;
  for (const uint64_t late : {uint64_t{0}, uint64_t{4096}, uint64_t{1} << 40}) {
    for (uint64_t turn = late; turn < late + kTurns; ++turn) {
      EXPECT_EQ(FindDifferenceInSamples(ranges_, 3, turn), 4u) << turn;
    }
  }
  to_ = from_;
  for (size_t i = 0; i < to_.size(); ++i) ranges_[i].to = to_[i].data();
  to_[4][3 * kSampleEveryBytes + 130] ^= 1;
  for (const uint64_t late : {uint64_t{0}, uint64_t{4096}, uint64_t{1} << 40}) {
    size_t seen = 0;
    for (uint64_t turn = late; turn < late + kTurns; ++turn) {
      seen += FindDifferenceInSamples(ranges_, 3, turn) == 4u;
    }
    EXPECT_EQ(seen, 1u) << late;
  }
}

TEST_F(MemoryPassesTest, RefusesWhatMakesNoSense) {
  EXPECT_EQ(superoffload_copy_and_digest(nullptr, 1, 1, nullptr), 3);
  EXPECT_EQ(superoffload_copy_and_digest(nullptr, 0, 1, nullptr), 0);
}

}  // namespace
}  // namespace superoffload::client
