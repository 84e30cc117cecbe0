// Arrays of random numbers in any dtype.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_RANDOM_ELEMENTS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_RANDOM_ELEMENTS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/elements/elements.h"
#include "kernels/elements/scalar_element.h"

namespace superoffload::test {

// Of mean 0 and variance 1, nearly normal: the sum of four uniform numbers (Irwin and Hall). std::normal_distribution
// takes longer than the steps of which these make the gradients.
inline float NearlyNormal(std::mt19937_64& random) {
  const uint64_t bits = random();
  const auto sum = static_cast<int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  constexpr int32_t kMean = 2 * 0xffff;
  constexpr float kDeviation = 0x1p16f / 1.7320508f;
  return static_cast<float>(sum - kMean) / kDeviation;
}

// Stores `n` of them, times `size`.
inline void FillNearlyNormal(size_t n, float size, kernels::MutableElements to, std::mt19937_64& random) {
  std::vector<float> values(n);
  for (float& value : values) value = size * NearlyNormal(random);
  kernels::Narrow(n, values.data(), to);
}

// Finite normal numbers of sizes from 2^lowest to 2^9: what a NaN looks like is up to each processor.
inline std::vector<std::byte> RandomElements(size_t n, kernels::DType dtype, int lowest, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<std::byte> elements(n * kernels::DTypeBytes(dtype));
  for (size_t i = 0; i < n; ++i) {
    const float scale =
        std::exp2(static_cast<float>(random() % static_cast<unsigned>(10 - lowest)) + static_cast<float>(lowest));
    kernels::StoreElement({elements.data(), dtype}, i, normal(random) * scale);
  }
  return elements;
}

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_RANDOM_ELEMENTS_H_
