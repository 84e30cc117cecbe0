// The scalar reference of algorithm.h's passes, from an algorithm's formula for one element: a struct with `Step` and
// `kArrays`, as in vector/pass-inl.h, and
//
//   static void Update(const Step&, float gradient, float* element)    element[a]: of state array a, in place
#ifndef SUPEROFFLOAD_KERNELS_SCALAR_PASS_H_
#define SUPEROFFLOAD_KERNELS_SCALAR_PASS_H_

#include "kernels/algorithm.h"
#include "kernels/elements/scalar_element.h"
#include "kernels/undo_slot.h"

namespace superoffload::kernels {

template <class F>
struct ScalarPasses {
  static void LoadState(const StateView& state, size_t i, float* element) {
    for (size_t a = 0; a < F::kArrays; ++a) element[a] = state.Floats(a)[i];
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                     ConstElements pending, UndoSlot* undo) {
    const auto step = absorb.As<typename F::Step>();
    for (size_t i = first; i < n; ++i) {
      float element[F::kArrays];
      LoadState(state, i, element);
      if (undo != nullptr) {
        for (size_t a = 0; a < F::kArrays; ++a) *undo->Old<float>(a, i) = element[a];
        KeepOrder();
        undo->torn = TornGranule(i, 1);
        KeepOrder();
      }
      F::Update(step, LoadElement(pending, i), element);
      for (size_t a = 0; a < F::kArrays; ++a) state.Floats(a)[i] = element[a];
    }
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    const auto step = publish.As<typename F::Step>();
    for (size_t i = first; i < n; ++i) {
      float element[F::kArrays];
      LoadState(state, i, element);
      const float g = LoadElement(gradient, i);
      F::Update(step, g, element);
      StoreElement(theta, i, element[0]);
      if (norm != nullptr) norm->lanes[i % kNormLanes] += double{g} * g;
    }
  }

  static void AbsorbAndPublish(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                               ConstElements pending, const StepConstants& publish, ConstElements gradient,
                               MutableElements theta, NormLanes* norm, UndoSlot* undo) {
    Absorb(first, n, state, absorb, pending, undo);
    Publish(first, n, state, publish, gradient, theta, norm);
  }

  static void Plain(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                    ConstElements pending, MutableElements theta) {
    Absorb(first, n, state, absorb, pending, nullptr);
    for (size_t i = first; i < n; ++i) StoreElement(theta, i, state.Floats(0)[i]);
  }

  static constexpr AlgorithmKernels Table() { return {"SCALAR", Absorb, Publish, AbsorbAndPublish, Plain}; }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_SCALAR_PASS_H_
