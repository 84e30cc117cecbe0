// Algorithms that differ in what an engine sees of them: how state is stored, grain, and whether places count.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_ALGORITHM_KINDS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_ALGORITHM_KINDS_H_

#include <algorithm>
#include <vector>

#include "kernels/algorithm.h"

namespace superoffload::test {

// The first of each kind.
inline std::vector<const kernels::Algorithm*> EveryKindOfAlgorithm() {
  const auto alike = [](const kernels::Algorithm& a, const kernels::Algorithm& b) {
    return a.block_elements == b.block_elements && (a.stages == nullptr) == (b.stages == nullptr) &&
           a.rounds_stochastically == b.rounds_stochastically &&
           std::ranges::equal(a.arrays, b.arrays, {}, &kernels::StateArray::dtype, &kernels::StateArray::dtype);
  };
  std::vector<const kernels::Algorithm*> kinds;
  for (const kernels::Algorithm* algorithm : kernels::Algorithms()) {
    if (std::ranges::none_of(kinds, [&](const auto* kind) { return alike(*kind, *algorithm); })) {
      kinds.push_back(algorithm);
    }
  }
  return kinds;
}

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_ALGORITHM_KINDS_H_
