// Philox against the vectors of its authors, and what is drawn for whom.
#include "kernels/random/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace superoffload::kernels {
namespace {

uint32_t BitsOf(PhiloxKey key, uint32_t step, uint64_t element, size_t array) {
  return RoundingHalf(RoundingWord(key, step, element, RoundingPair(array)), array);
}

// philox4x32 with 7 rounds, of kat_vectors in Random123.
TEST(PhiloxTest, GivesThePublishedWords) {
  EXPECT_EQ(Philox({{0, 0}}, {{0, 0, 0, 0}}), (PhiloxBlock{{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}));
  constexpr uint32_t kAll = 0xffffffff;
  EXPECT_EQ(Philox({{kAll, kAll}}, {{kAll, kAll, kAll, kAll}}),
            (PhiloxBlock{{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}));
  EXPECT_EQ(Philox({{0xa4093822, 0x299f31d0}}, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}),
            (PhiloxBlock{{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}));
}

TEST(RoundingTest, SeedParameterStepElementAndArrayEachChangeTheBits) {
  std::set<std::vector<uint32_t>> drawn;
  size_t draws = 0;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
    for (const char* parameter : {"a", "b", "layers.0.weight"}) {
      for (const uint32_t step : {1, 2}) {
        for (const size_t array : {1, 2, 3, 4}) {
          for (const uint64_t block : {uint64_t{0}, uint64_t{64}, uint64_t{1} << 34}) {
            std::vector<uint32_t> bits;
            for (uint64_t i = 0; i < 64; ++i) {
              bits.push_back(BitsOf(RoundingKey(seed, RoundingHash(parameter)), step, block + i, array));
              EXPECT_LT(bits.back(), 0x10000u);
            }
            EXPECT_GT(std::set<uint32_t>(bits.begin(), bits.end()).size(), 60u);
            drawn.insert(bits);
            ++draws;
          }
        }
      }
    }
  }
  EXPECT_EQ(drawn.size(), draws);
}

TEST(RoundingTest, TheMeanOfWhatIsStoredIsTheNumber) {
  const PhiloxKey key = RoundingKey(7, RoundingHash("p"));
  for (const float value : {1.001f, -3.3e-5f, 0.7f, 6e-39f, -1e30f}) {
    const float lower = WidenBFloat16(RoundToBFloat16(value, 0)), upper = WidenBFloat16(RoundToBFloat16(value, 0xffff));
    const double n = 1 << 18, probability = (double{value} - lower) / (double{upper} - lower);
    double ups = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const float stored = WidenBFloat16(RoundToBFloat16(value, BitsOf(key, i % 64, i, 1 + i % 2)));
      ASSERT_TRUE(stored == lower || stored == upper) << value;
      ups += stored == upper;
    }
    EXPECT_NEAR(ups / n, probability, 6 * std::sqrt(probability * (1 - probability) / n)) << value;
  }
}

TEST(RoundingTest, WhatBFloat16HasStaysWhatItIs) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = WidenBFloat16(static_cast<uint16_t>(half));
    for (const uint32_t bits : {0u, 1u, 0xffffu}) {
      if (std::isnan(value)) {
        EXPECT_EQ(RoundToBFloat16(value, bits), (half & 0x8000) | 0x7fc0);
      } else {
        EXPECT_EQ(RoundToBFloat16(value, bits), half);
      }
    }
  }
}

// Against going through the tensor one by one.
TEST(BoxElementsTest, FindsEveryElement) {
  struct Case {
    std::vector<uint64_t> shape, global, offset;
  };
  for (const auto& [shape, global, offset] : std::vector<Case>{
           {{}, {}, {}},
           {{7}, {20}, {5}},
           {{3, 4}, {3, 4}, {0, 0}},
           {{2, 4}, {6, 4}, {3, 0}},
           {{3, 2}, {3, 5}, {0, 1}},
           {{2, 3, 2, 2}, {3, 3, 4, 2}, {1, 0, 1, 0}},
           {{2, 1, 2, 3, 2}, {4, 2, 3, 3, 5}, {1, 1, 1, 0, 3}},
       }) {
    BoxElements box;
    ASSERT_TRUE(BoxElements::Make(shape, global, offset, &box));
    uint64_t elements = 1;
    for (const uint64_t size : shape) elements *= size;
    std::vector<uint64_t> expected;
    for (uint64_t i = 0; i < elements; ++i) {
      uint64_t rest = i, element = 0, stride = 1;
      for (size_t d = shape.size(); d-- > 0;) {
        element += (offset[d] + rest % shape[d]) * stride;
        rest /= shape[d];
        stride *= global[d];
      }
      expected.push_back(element);
    }
    for (uint64_t i = 0; i < elements; ++i) {
      const BoxElements::Place place = box.Find(i);
      for (uint64_t k = 0; k < place.count && i + k < elements; ++k) ASSERT_EQ(place.element + k, expected[i + k]);
    }
  }
}

TEST(BoxElementsTest, RefusesTooManyCuts) {
  const std::vector<uint64_t> shape(16, 2), global(16, 3), offset(16, 1);
  BoxElements box;
  EXPECT_FALSE(BoxElements::Make(shape, global, offset, &box));
}

}  // namespace
}  // namespace superoffload::kernels
