// The table of an algorithm's scalar passes, from the two that write: Passes::Absorb and Passes::Publish, as
// algorithm.h has them. The others are these one after the other.
#ifndef SUPEROFFLOAD_KERNELS_SCALAR_TABLE_H_
#define SUPEROFFLOAD_KERNELS_SCALAR_TABLE_H_

#include "kernels/algorithm.h"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {

template <class Passes, DType kMasters = DType::kFloat32>
struct ScalarTable {
  static void AbsorbAndPublish(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                               ConstElements pending, const StepConstants& publish, ConstElements gradient,
                               MutableElements theta, NormLanes* norm, UndoSlot* undo) {
    Passes::Absorb(first, n, state, absorb, pending, undo);
    Passes::Publish(first, n, state, publish, gradient, theta, norm);
  }

  static void Plain(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                    MutableElements theta) {
    Passes::Absorb(first, n, state, absorb, pending, nullptr);
    for (size_t i = first; i < n; ++i) {
      StoreElement(theta, i, LoadElement({state.arrays[0], kMasters}, i));
    }
  }

  static constexpr AlgorithmKernels Table() {
    return {"SCALAR", Passes::Absorb, Passes::Publish, AbsorbAndPublish, Plain};
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_SCALAR_TABLE_H_
