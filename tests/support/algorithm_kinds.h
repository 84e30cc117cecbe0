// Algorithms that differ in what an engine sees of them: how state is stored, grain, and whether places count.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_ALGORITHM_KINDS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_ALGORITHM_KINDS_H_

#include <algorithm>
#include <vector>

#include "kernels/algorithm.h"
#include "server/engine/spec.h"

namespace superoffload::test {

// The first of each kind.
inline std::vector<const kernels::Algorithm*> EveryKindOfAlgorithm() {
  const auto alike = [](const kernels::Algorithm& a, const kernels::Algorithm& b) {
    return a.block_elements == b.block_elements && (a.stages == nullptr) == (b.stages == nullptr) &&
           a.rounds_moments == b.rounds_moments && a.rounds_masters == b.rounds_masters &&
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

// Every third parameter keeps its state in fp32, where the algorithm has narrower state.
inline void KeepSomeInFp32(engine::OptimizerSpec& spec) {
  for (size_t i = 1; i < spec.parameters.size(); i += 3) {
    spec.parameters[i].in_fp32 = spec.algorithm->in_fp32 != nullptr;
  }
}

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_ALGORITHM_KINDS_H_
