// How one element of an algorithm's state is stored (Format), on the host and on the GPU. F: a formula, as
// scalar_pass.h takes it; of at most three arrays.
#ifndef SUPEROFFLOAD_KERNELS_STORED_STATE_H_
#define SUPEROFFLOAD_KERNELS_STORED_STATE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/algorithm.h"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {

// Of one element, by RoundingPair; only what is asked for is drawn.
struct RoundingPairs {
  uint32_t words[2] = {};
};

template <class F, Format kFormat>
struct StoredState {
  static_assert(F::kArrays <= 3, "more than two moments need more pairs");
  static constexpr bool kRoundsMasters = kFormat.masters == Masters::kRoundedBFloat16;
  static constexpr bool kRoundsMoments = kFormat.moments == Moments::kRoundedBFloat16;

  SUPEROFFLOAD_HOST_DEVICE static void Load(const StateView& state, size_t i, float* element) {
    for (size_t a = 0; a < F::kArrays; ++a) element[a] = LoadElement({state.arrays[a], kFormat.TypeOf(a)}, i);
  }

  // The master weight as it is stored, and published.
  SUPEROFFLOAD_HOST_DEVICE static float Master(float p, const RoundingPairs& pairs) {
    if constexpr (kRoundsMasters) return RoundedMaster(p, pairs.words[RoundingPair(0)]);
    return p;
  }

  SUPEROFFLOAD_HOST_DEVICE static void Store(const StateView& state, size_t i, const RoundingPairs& pairs,
                                             const float* element) {
    StoreElement({state.arrays[0], kFormat.TypeOf(0)}, i, Master(element[0], pairs));
    for (size_t a = 1; a < F::kArrays; ++a) {
      if constexpr (kRoundsMoments) {
        static_cast<uint16_t*>(state.arrays[a])[i] =
            RoundToBFloat16(element[a], RoundingHalf(pairs.words[RoundingPair(a)], a));
      } else {
        StoreElement({state.arrays[a], kFormat.TypeOf(a)}, i, element[a]);
      }
    }
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_STORED_STATE_H_
