// The fp32 constants of one step, for every parameter that takes part in it.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_STEP_TERMS_H_
#define SUPEROFFLOAD_SERVER_ENGINE_STEP_TERMS_H_

#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kernels/algorithm.h"
#include "server/engine/record.h"

namespace superoffload::engine {

// Parameters of one group have the same constants, but for those that lacked gradients in earlier steps: their step
// counts are smaller. So there are few to make.
class StepTerms {
 public:
  StepTerms() = default;
  StepTerms(const kernels::Algorithm* algorithm, StepValues values)
      : algorithm_(algorithm), values_(std::move(values)) {}

  const StepValues& values() const { return values_; }

  // `t` counts the steps of the parameter, this one included.
  kernels::StepConstants Of(uint32_t group, uint64_t t) {
    const auto [made, inserted] = made_.try_emplace({group, t});
    if (inserted) {
      const double* const scalars = values_.scalars.data() + group * algorithm_->scalars.size();
      made->second = algorithm_->make_constants(scalars, t, values_.gradient_scale);
    }
    return made->second;
  }

 private:
  const kernels::Algorithm* algorithm_ = nullptr;
  StepValues values_;
  absl::flat_hash_map<std::pair<uint32_t, uint64_t>, kernels::StepConstants> made_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_STEP_TERMS_H_
