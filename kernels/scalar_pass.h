// The scalar reference of algorithm.h's passes, from an algorithm's formula for one element, which does not know how
// its state is stored: a struct with
//
//   using Step                          its constants, as StepConstants holds them; `step` among them is the
//   parameter's
//                                       step count, where state is rounded stochastically
//   static constexpr size_t kArrays     of its state
//   static void Update(const Step&, float gradient, float* element)    element[a]: of state array a, in place
#ifndef SUPEROFFLOAD_KERNELS_SCALAR_PASS_H_
#define SUPEROFFLOAD_KERNELS_SCALAR_PASS_H_

#include <cstring>

#include "kernels/algorithm.h"
#include "kernels/elements/scalar_element.h"
#include "kernels/scalar_table.h"
#include "kernels/stored_state.h"
#include "kernels/undo_slot.h"

namespace superoffload::kernels {

template <class F, Format kFormat = Format{}>
struct ScalarPasses : ScalarTable<ScalarPasses<F, kFormat>, kFormat.TypeOf(0)> {
  using Stored = StoredState<F, kFormat>;

  template <bool kMaster, bool kMoments>
  static RoundingPairs PairsOf(const StateView& state, const typename F::Step& step, size_t i) {
    RoundingPairs pairs;
    if constexpr (kMaster) pairs.words[RoundingPair(0)] = ElementWord(state.rounding, step.step, i, RoundingPair(0));
    if constexpr (kMoments) pairs.words[RoundingPair(1)] = ElementWord(state.rounding, step.step, i, RoundingPair(1));
    return pairs;
  }

  static void SaveState(const StateView& state, size_t i, UndoSlot& undo) {
    for (size_t a = 0; a < F::kArrays; ++a) {
      const size_t bytes = DTypeBytes(kFormat.TypeOf(a));
      std::memcpy(undo.OldBytes(a, kUndoElements) + i % kUndoElements * bytes,
                  static_cast<const std::byte*>(state.arrays[a]) + i * bytes, bytes);
    }
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    const auto step = absorb.As<typename F::Step>();
    for (size_t i = first; i < n; ++i) {
      float element[F::kArrays];
      Stored::Load(state, i, element);
      if (undo != nullptr) {
        SaveState(state, i, *undo);
        KeepOrder();
        undo->torn = TornGranule(i, 1);
        KeepOrder();
      }
      F::Update(step, LoadElement(pending, i), element);
      Stored::Store(state, i, PairsOf<Stored::kRoundsMasters, Stored::kRoundsMoments>(state, step, i), element);
    }
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    const auto step = publish.As<typename F::Step>();
    for (size_t i = first; i < n; ++i) {
      float element[F::kArrays];
      Stored::Load(state, i, element);
      const float g = LoadElement(gradient, i);
      F::Update(step, g, element);
      StoreElement(theta, i, Stored::Master(element[0], PairsOf<Stored::kRoundsMasters, false>(state, step, i)));
      if (norm != nullptr) norm->lanes[i % kNormLanes] += double{g} * g;
    }
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_SCALAR_PASS_H_
