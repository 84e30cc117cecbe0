#include "kernels/digest/digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <span>
#include <vector>

namespace superoffload::kernels {
namespace {

std::vector<std::byte> Random(size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> result(bytes);
  for (std::byte& byte : result) byte = static_cast<std::byte>(random());
  return result;
}

constexpr size_t kSizes[] = {0, 1, 63, 64, 65, 4095, 8192, 8193, 100'000};

TEST(DigestTest, CopiesAndGivesTheSameNumber) {
  for (const size_t size : kSizes) {
    const std::vector<std::byte> from = Random(size, 1);
    std::vector<std::byte> to(size + 1, std::byte{7});
    EXPECT_EQ(CopyAndDigest(from, to.data(), 3), Digest(from, 3)) << size;
    EXPECT_TRUE(std::ranges::equal(from, std::span(to).first(size)) && to[size] == std::byte{7}) << size;
  }
}

TEST(DigestTest, SeesEveryBit) {
  for (const size_t size : {1, 64, 130}) {
    std::vector<std::byte> bytes = Random(size, 2);
    std::set<uint64_t> seen = {Digest(bytes, 0)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      const auto mask = static_cast<std::byte>(1 << bit % 8);
      bytes[bit / 8] ^= mask;
      seen.insert(Digest(bytes, 0));
      bytes[bit / 8] ^= mask;
    }
    EXPECT_EQ(seen.size(), 8 * size + 1);
  }
}

// Edits that sums without the places of their terms would miss.
TEST(DigestTest, SeesWhatIsSwappedNegatedOrMoved) {
  std::vector<float> values(4096);
  for (size_t i = 0; i < values.size(); ++i) values[i] = i % 2 ? 1.0F : -1.0F;
  const auto digest = [&] { return Digest(std::as_bytes(std::span(values)), 0); };
  std::set<uint64_t> seen = {digest()};
  for (float& value : values) value = -value;
  EXPECT_TRUE(seen.insert(digest()).second) << "all signs";
  for (size_t i = 0; i < 64; ++i) values[i] = -values[i];
  EXPECT_TRUE(seen.insert(digest()).second) << "some signs";
  for (size_t i = 0; i < 64; ++i) std::swap(values[i], values[4094 - i]);
  EXPECT_TRUE(seen.insert(digest()).second) << "swapped";
  std::ranges::fill(values, 0.0F);
  EXPECT_TRUE(seen.insert(digest()).second) << "zeros";
  values.push_back(0.0F);
  EXPECT_TRUE(seen.insert(digest()).second) << "one more zero";
  EXPECT_NE(Digest(std::as_bytes(std::span(values)), 1), digest()) << "another place";
}

TEST(SamplesTest, SeeEveryChangeThatIsLongEnough) {
  constexpr size_t kEvery = 1024;
  for (const size_t size : kSizes) {
    const std::vector<std::byte> a = Random(size, 4);
    for (size_t place = 0; place < kEvery; place += kSampleBytes) {
      EXPECT_TRUE(SamplesAreEqual(a, a.data(), kEvery, place)) << size;
      const size_t changed = std::min(size, kEvery);
      for (size_t begin = 0; changed > 0 && begin + changed <= size; begin += 97) {
        std::vector<std::byte> b = a;
        for (size_t i = begin; i < begin + changed; ++i) b[i] ^= std::byte{1};
        EXPECT_FALSE(SamplesAreEqual(a, b.data(), kEvery, place)) << size << " at " << begin << ", place " << place;
        if (size > 10'000) begin += 7919;
      }
    }
  }
}

}  // namespace
}  // namespace superoffload::kernels
