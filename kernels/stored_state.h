// How one element of an algorithm's state is stored (Moments), on the host and on the GPU: array 0 in fp32, the others
// in fp32 or bf16. F: a formula, as scalar_pass.h takes it.
#ifndef SUPEROFFLOAD_KERNELS_STORED_STATE_H_
#define SUPEROFFLOAD_KERNELS_STORED_STATE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/algorithm.h"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {

template <class F, Moments kMoments>
struct StoredState {
  static constexpr bool kRounds = kMoments == Moments::kRoundedBFloat16;

  SUPEROFFLOAD_HOST_DEVICE static constexpr DType TypeOf(size_t array) {
    return array == 0 || kMoments == Moments::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  }

  SUPEROFFLOAD_HOST_DEVICE static void Load(const StateView& state, size_t i, float* element) {
    for (size_t a = 0; a < F::kArrays; ++a) element[a] = LoadElement({state.arrays[a], TypeOf(a)}, i);
  }

  // `word`: the element's random bits (RoundingWord), of state that is rounded stochastically.
  SUPEROFFLOAD_HOST_DEVICE static void Store(const StateView& state, size_t i, uint32_t word, const float* element) {
    static_assert(F::kArrays <= 3, "more than two arrays need more words");
    StoreElement({state.arrays[0], DType::kFloat32}, i, element[0]);
    for (size_t a = 1; a < F::kArrays; ++a) {
      if constexpr (kRounds) {
        static_cast<uint16_t*>(state.arrays[a])[i] = RoundToBFloat16(element[a], RoundingHalf(word, a));
      } else {
        StoreElement({state.arrays[a], TypeOf(a)}, i, element[a]);
      }
    }
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_STORED_STATE_H_
