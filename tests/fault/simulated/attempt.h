// One step as a trainer means it, whatever becomes of it: the same attempt may be submitted several times.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_ATTEMPT_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_ATTEMPT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tests/fault/simulated/ground.h"

namespace superoffload::faults {

// What one of its backward passes brings.
struct AttemptPass {
  std::vector<std::byte> gradients;  // as the layout has slot 0
  std::vector<bool> absent;          // by parameter
};

struct Attempt {
  std::vector<AttemptPass> passes;                    // one, at least
  std::vector<std::byte> gradients;                   // their sum
  std::vector<bool> absent;                           // from all of them
  std::vector<std::optional<double>> sums;            // that the trainer states, by bucket
  std::vector<engine::Scalars> early_groups, groups;  // those of BEGIN_STEP and of END_STEP
  double early_scale = 1, scale = 1;
  double max_grad_norm = 0;
  bool measure = false;
  bool bad_elsewhere = false;             // a gradient of another rank
  std::optional<uint32_t> abandon_after;  // so many buckets

  // Where the gradient of `bucket` lies.
  const std::byte* Gradient(const engine::BucketLayout& bucket) const {
    return gradients.data() + bucket.gradient_offsets[0];
  }
};

// `groups`: the hyper-parameters up to now.
Attempt MakeAttempt(Ground& ground, const std::vector<engine::Scalars>& groups);

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_ATTEMPT_H_
