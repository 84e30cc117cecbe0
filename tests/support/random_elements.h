// Arrays of random numbers in any dtype.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_RANDOM_ELEMENTS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_RANDOM_ELEMENTS_H_

#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include "kernels/elements/scalar_element.h"

namespace superoffload::test {

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
