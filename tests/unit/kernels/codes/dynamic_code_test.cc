#include "kernels/codes/dynamic_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace superoffload::kernels {
namespace {

// As bitsandbytes makes its map (functional.py, create_dynamic_map with 7 exponent bits of 8), in fp64.
std::set<double> BitsandbytesMap(bool with_sign) {
  std::set<double> values = {0, 1};
  for (int i = 0; i < 7; ++i) {
    const int items = 1 << (with_sign ? i : i + 1);
    for (int k = 0; k < items; ++k) {
      const double step = 0.9 / items;
      const double mean = ((0.1 + k * step) + (0.1 + (k + 1) * step)) / 2 * std::pow(10, i - 6);
      values.insert(mean);
      if (with_sign) values.insert(-mean);
    }
  }
  return values;
}

template <typename Code>
class DynamicCodeTest : public ::testing::Test {
 protected:
  static constexpr bool kSigned = Code::kOne == DynamicCode<true>::kOne;

  static std::array<float, 256> Values(float scale = 1) {
    std::array<float, 256> values;
    for (size_t code = 0; code < values.size(); ++code) values[code] = Code::Decode(static_cast<uint8_t>(code), scale);
    return values;
  }

  // Numbers of every magnitude that a block may have.
  std::vector<float> Block(size_t n) {
    std::normal_distribution<float> exponent(-3, 3);
    std::uniform_real_distribution<float> fraction(kSigned ? -1.0f : 0.0f, 1);
    std::vector<float> values(n);
    for (float& value : values) value = fraction(random_) * std::pow(10.0f, exponent(random_));
    return values;
  }

  std::mt19937 random_{5};
};

using Codes = ::testing::Types<DynamicCode<true>, DynamicCode<false>>;
TYPED_TEST_SUITE(DynamicCodeTest, Codes);

TYPED_TEST(DynamicCodeTest, TheNumbersAreThoseOfBitsandbytes) {
  const auto values = this->Values();
  std::vector<float> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const std::set<double> map = BitsandbytesMap(this->kSigned);
  ASSERT_EQ(map.size(), sorted.size());
  size_t i = 0;
  for (const double value : map) {
    EXPECT_NEAR(sorted[i], value, std::abs(value) * 1e-6);
    ++i;
  }
}

TYPED_TEST(DynamicCodeTest, ANumberBecomesTheNearestCode) {
  const auto values = this->Values();
  std::uniform_real_distribution<float> exponent(-9, 0);
  for (int i = 0; i < 200'000; ++i) {
    const float sign = this->kSigned && i % 2 == 1 ? -1.0f : 1.0f;
    const float number = sign * std::pow(10.0f, exponent(this->random_));
    const uint8_t code = TypeParam::Encode(number, 1);
    double least = std::numeric_limits<double>::infinity();
    for (size_t other = this->kSigned ? 0 : 1; other < values.size(); ++other) {
      least = std::min(least, std::abs(double{values[other]} - number));
    }
    // Where two are equally near, either.
    EXPECT_LE(std::abs(double{values[code]} - number), least + 1e-6 * std::abs(number)) << number;
  }
}

TYPED_TEST(DynamicCodeTest, WhatWasDecodedIsEncodedAsItWas) {
  for (int round = 0; round < 2000; ++round) {
    const std::vector<float> block = this->Block(1 + round % kCodeBlock);
    std::vector<uint8_t> codes(block.size()), again(block.size());
    std::vector<float> decoded(block.size());
    float scale = 0, scale_again = 0;
    TypeParam::EncodeBlock(block.size(), block.data(), codes.data(), &scale);
    EXPECT_EQ(std::abs(scale), std::abs(*std::max_element(block.begin(), block.end(),
                                                          [](float a, float b) { return std::abs(a) < std::abs(b); })));
    TypeParam::DecodeBlock(block.size(), codes.data(), &scale, decoded.data());
    TypeParam::EncodeBlock(block.size(), decoded.data(), again.data(), &scale_again);
    EXPECT_EQ(scale_again, scale);
    EXPECT_EQ(again, codes);
  }
}

// A code is decoded by one product, as whoever reads a checkpoint may do.
TYPED_TEST(DynamicCodeTest, ScalesMultiply) {
  const auto values = this->Values();
  for (const float scale : {1.0f, 3.7f, 1.3e-12f, -0.11f}) {
    const auto scaled = this->Values(scale);
    for (size_t code = 0; code < values.size(); ++code) EXPECT_EQ(scaled[code], values[code] * scale) << code;
  }
}

TYPED_TEST(DynamicCodeTest, NothingIsDividedByZero) {
  std::vector<float> zeros(kCodeBlock), decoded(kCodeBlock, 1);
  std::vector<uint8_t> codes(kCodeBlock, 7);
  float scale = 1;
  TypeParam::EncodeBlock(kCodeBlock, zeros.data(), codes.data(), &scale);
  EXPECT_EQ(scale, 0);
  EXPECT_EQ(codes, std::vector<uint8_t>(kCodeBlock));
  TypeParam::DecodeBlock(kCodeBlock, codes.data(), &scale, decoded.data());
  EXPECT_EQ(decoded, zeros);
  EXPECT_EQ(TypeParam::Encode(std::numeric_limits<float>::quiet_NaN(), 1), 0);
}

TEST(UnsignedCodeTest, OnlyZeroBecomesZero) {
  EXPECT_EQ(DynamicCode<false>::Encode(0, 1), 0);
  for (const float number : {1e-30f, 1e-9f, 1e-7f}) EXPECT_NE(DynamicCode<false>::Encode(number, 1), 0) << number;
  EXPECT_EQ(DynamicCode<true>::Encode(1e-9f, 1), 0);
}

}  // namespace
}  // namespace superoffload::kernels
