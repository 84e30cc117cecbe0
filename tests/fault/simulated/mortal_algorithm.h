// The real algorithms with kernels that may be killed at any instruction. What that leaves is what kernels/undo_slot.h
// says: the real kernel runs up to some element; then the old values of a granule are saved, or some of them; then the
// granule is named, and some of its elements are overwritten.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_MORTAL_ALGORITHM_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_MORTAL_ALGORITHM_H_

#include <cstddef>

#include "kernels/algorithm.h"
#include "tests/fault/simulated/death_plan.h"
#include "tests/fault/simulated/random_source.h"

namespace superoffload::faults {

// Who decides for the kernels, which have no context of their own. For the one run that is under way.
class KernelDeaths {
 public:
  KernelDeaths(DeathPlan* plan, RandomSource* random);
  ~KernelDeaths();
  KernelDeaths(const KernelDeaths&) = delete;
  KernelDeaths& operator=(const KernelDeaths&) = delete;

  // Another daemon may run on another instruction set: chooses among those of this machine.
  void ChooseInstructionSet();

  DeathPlan& plan() { return plan_; }
  RandomSource& random() { return random_; }
  size_t instruction_set() const { return instruction_set_; }

 private:
  DeathPlan& plan_;
  RandomSource& random_;
  size_t instruction_set_ = 0;
};

// Number `index` of kernels::Algorithms(); equal to it but for the deaths.
const kernels::Algorithm& MortalAlgorithm(size_t index);

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_MORTAL_ALGORITHM_H_
