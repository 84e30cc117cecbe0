// State arrays as they are stored: what vectors of a state array are made of, and how they are rounded, for the sources
// that are compiled once per instruction set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_STORED_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_STORED_INL_H_

#include <tuple>
#include <utility>

#include "kernels/algorithm.h"
#include "kernels/vector/codecs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// How array kArray of a state is stored: Entry, Load, Store of a new value, and Keep of one that was loaded. `words`
// are those of random/rounding.h for the elements, where kRounds.
template <size_t kArray>
struct StoredFloat32 {
  using Entry = float;
  static constexpr DType kDType = DType::kFloat32;
  static constexpr bool kRounds = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const float* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, float* to, const uint32_t*) {
    hn::StoreU(value, d, to);
  }
  template <class D>
  static HWY_INLINE void Keep(D d, hn::Vec<D> value, float* to) {
    hn::StoreU(value, d, to);
  }
};

// To nearest even.
template <size_t kArray>
struct StoredBFloat16 {
  using Entry = uint16_t;
  static constexpr DType kDType = DType::kBFloat16;
  static constexpr bool kRounds = false;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
    return BFloat16::Load(d, from);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, const uint32_t*) {
    BFloat16::Store(d, value, to);
  }
  template <class D>
  static HWY_INLINE void Keep(D d, hn::Vec<D> value, uint16_t* to) {
    const hn::RebindToUnsigned<D> du;
    StoreHalves(d, hn::ShiftRight<16>(hn::BitCast(du, value)), to, /*stream=*/false);
  }
};

// Stochastically.
template <size_t kArray>
struct RoundedBFloat16 : StoredBFloat16<kArray> {
  static constexpr bool kRounds = true;
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, const uint32_t* words) {
    const hn::RebindToUnsigned<D> du;
    const auto word = hn::LoadU(du, words);
    const auto bits = hn::BitCast(du, value);
    const auto sum = hn::Add(bits, kArray % 2 == 1 ? hn::And(word, hn::Set(du, 0xffff)) : hn::ShiftRight<16>(word));
    BFloat16::StoreRounded(d, value, sum, to, /*stream=*/false);
  }
};

// The arrays of an algorithm's state, in its order.
template <class... Arrays>
struct StoredArrays {
  static constexpr size_t kCount = sizeof...(Arrays);
  static constexpr DType kDTypes[] = {Arrays::kDType...};
  static constexpr bool kRounds = (Arrays::kRounds || ...);
  template <size_t kArray>
  using At = std::tuple_element_t<kArray, std::tuple<Arrays...>>;

  // To the same element of each.
  struct Pointers {
    std::tuple<typename Arrays::Entry*...> arrays;

    template <size_t kArray>
    HWY_INLINE auto* at() const {
      return std::get<kArray>(arrays);
    }
  };

  static Pointers PointersTo(void* const* arrays) {
    return {[&]<size_t... kArrays>(std::index_sequence<kArrays...>) {
      return std::tuple(static_cast<typename Arrays::Entry*>(arrays[kArrays])...);
    }(std::make_index_sequence<kCount>())};
  }
};

// A moment, array kArray of its state.
template <Moments moments, size_t kArray>
using StoredMoment = std::conditional_t<
    moments == Moments::kFloat32, StoredFloat32<kArray>,
    std::conditional_t<moments == Moments::kBFloat16, StoredBFloat16<kArray>, RoundedBFloat16<kArray>>>;
}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_STORED_INL_H_
