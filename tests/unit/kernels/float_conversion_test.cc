// Every vector conversion equals the scalar one, and the scalar one equals the definition of rounding to nearest even.
#include "kernels/float_conversion.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/elements/element_kernels.h"

namespace superoffload::kernels {
namespace {

// All exponents with mantissas around every rounding boundary of both formats, and random ones.
std::vector<float> InterestingFloats() {
  std::vector<float> values;
  const auto add = [&](uint32_t bits) {
    values.push_back(std::bit_cast<float>(bits));
    values.push_back(std::bit_cast<float>(bits | 0x80000000));
  };
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t shift = 0; shift < 23; ++shift) {
      for (uint32_t delta : {0u, 1u, 0x7fffffu}) add(exponent << 23 | ((1u << shift) + delta) % 0x800000);
    }
    for (uint32_t high = 0; high < 64; ++high) {
      for (uint32_t low : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u}) {
        add(exponent << 23 | ((high << 17 | high << 13 | low) & 0x7fffff));
      }
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) add(random() & 0x7fffffff);
  return values;
}

// Nearest representable value by searching the format itself, ties to the even code.
uint16_t NarrowBySearch(float value, float (*widen)(uint16_t), uint16_t infinity) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  uint16_t low = 0, high = infinity;  // codes of non-negative values are ordered
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>(low + (high - low) / 2);
    (static_cast<double>(widen(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = widen(low);
  // Past the largest finite value, rounding goes as if the next exponent existed.
  const double above = high == infinity ? below + (below - widen(static_cast<uint16_t>(low - 1))) : widen(high);
  const bool up = magnitude - below > above - magnitude || (magnitude - below == above - magnitude && low % 2 == 1);
  return static_cast<uint16_t>(sign | (up ? high : low));
}

TEST(FloatConversionTest, NarrowingIsRoundToNearestEven) {
  for (float value : InterestingFloats()) {
    if (std::isnan(value)) {
      const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
      ASSERT_EQ(NarrowToBFloat16(value), sign | 0x7fc0);
      ASSERT_EQ(NarrowToFloat16(value), sign | 0x7e00);
    } else if (std::isinf(value)) {
      ASSERT_TRUE(std::isinf(WidenBFloat16(NarrowToBFloat16(value))));
      ASSERT_TRUE(std::isinf(WidenFloat16(NarrowToFloat16(value))));
    } else {
      ASSERT_EQ(NarrowToBFloat16(value), NarrowBySearch(value, WidenBFloat16, 0x7f80)) << std::hexfloat << value;
      ASSERT_EQ(NarrowToFloat16(value), NarrowBySearch(value, WidenFloat16, 0x7c00)) << std::hexfloat << value;
    }
  }
}

TEST(FloatConversionTest, WideningThenNarrowingIsTheIdentity) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const uint16_t half = static_cast<uint16_t>(code);
    if (!std::isnan(WidenBFloat16(half))) {
      ASSERT_EQ(NarrowToBFloat16(WidenBFloat16(half)), half);
    }
    if (!std::isnan(WidenFloat16(half))) {
      ASSERT_EQ(NarrowToFloat16(WidenFloat16(half)), half);
    }
  }
}

TEST(FloatConversionTest, EveryTargetNarrowsAndWidensAsTheScalarOne) {
  const std::vector<float> values = InterestingFloats();
  std::vector<uint16_t> codes(0x10000);
  for (uint32_t code = 0; code < 0x10000; ++code) codes[code] = static_cast<uint16_t>(code);
  for (const ElementKernels* kernels : SupportedElementKernels()) {
    SCOPED_TRACE(kernels->target);
    for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      std::vector<uint16_t> expected(values.size()), actual(values.size());
      kScalarElementKernels.narrow(values.size(), values.data(), {expected.data(), dtype});
      kernels->narrow(values.size(), values.data(), {actual.data(), dtype});
      EXPECT_EQ(actual, expected);
      std::vector<float> expected_wide(codes.size()), actual_wide(codes.size());
      kScalarElementKernels.widen(codes.size(), {codes.data(), dtype}, expected_wide.data());
      kernels->widen(codes.size(), {codes.data(), dtype}, actual_wide.data());
      EXPECT_EQ(std::memcmp(actual_wide.data(), expected_wide.data(), codes.size() * sizeof(float)), 0);
    }
  }
}

}  // namespace
}  // namespace superoffload::kernels
