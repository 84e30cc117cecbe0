// State arrays as they are stored: what vectors of a state array are made of, and how they are rounded, for the sources
// that are compiled once per instruction set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_STORED_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_STORED_INL_H_

#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/algorithm.h"
#include "kernels/vector/call-inl.h"
#include "kernels/vector/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// How array kArray of a state is stored: Entry, Load, Store of a new value, and Keep of one that was loaded; Rounded is
// the value that a Store leaves. `words` are those of random/rounding.h for the elements, where kRounds.
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
  template <class D>
  static HWY_INLINE hn::Vec<D> Rounded(D, hn::Vec<D> value, const uint32_t*) {
    return value;
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
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Sum(D, hn::Vec<D> value, const uint32_t* words) {
    const hn::RebindToUnsigned<D> du;
    const auto word = hn::LoadU(du, words);
    return hn::Add(hn::BitCast(du, value),
                   kArray % 2 == 1 ? hn::And(word, hn::Set(du, 0xffff)) : hn::ShiftRight<16>(word));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, const uint32_t* words) {
    BFloat16::StoreRounded(d, value, Sum(d, value, words), to, /*stream=*/false);
  }
  // A NaN stays one, of its sign.
  template <class D>
  static HWY_INLINE hn::Vec<D> Rounded(D d, hn::Vec<D> value, const uint32_t* words) {
    const hn::RebindToUnsigned<D> du;
    const auto upper = hn::And(Sum(d, value, words), hn::Set(du, 0xffff0000));
    return hn::IfThenElse(hn::IsNaN(value), value, hn::BitCast(d, upper));
  }
};

// The words of a block's elements, of arrays that are rounded (kRounds) and share the pair of kArray.
template <bool kRounds, size_t kArray>
struct BlockWords {
  HWY_ALIGN uint32_t words[kRounds ? kBlockElements : 1];

  HWY_INLINE void Draw(const Rounding& rounding, const auto& step, size_t first, size_t n) {
    if constexpr (kRounds) RoundingWords(rounding, step.step, RoundingPair(kArray), first, n, words);
  }
  HWY_INLINE const uint32_t* at(size_t i) const { return kRounds ? words + i : nullptr; }
};

// `n` master weights, in fp32; the buffer has room for a block.
template <class Master>
HWY_INLINE const float* MastersOf(const typename Master::Entry* stored, size_t n, float* buffer) {
  if constexpr (std::is_same_v<typename Master::Entry, float>) {
    return stored;
  } else {
    const FloatTag d;
    for (size_t i = 0; i < n; i += hn::Lanes(d)) hn::Store(Master::Load(d, stored + i), d, buffer + i);
    return buffer;
  }
}

// The arrays of an algorithm's state, in its order.
template <class... Arrays>
struct StoredArrays {
  static constexpr size_t kCount = sizeof...(Arrays);
  static constexpr DType kDTypes[] = {Arrays::kDType...};
  template <size_t kArray>
  using At = std::tuple_element_t<kArray, std::tuple<Arrays...>>;
  static constexpr bool kRoundsMasters = At<0>::kRounds, kRoundsMoments = At<1>::kRounds;

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

template <Masters masters>
using StoredMaster = std::conditional_t<masters == Masters::kFloat32, StoredFloat32<0>, RoundedBFloat16<0>>;

// A moment, array kArray of its state.
template <Moments moments, size_t kArray>
using StoredMoment = std::conditional_t<
    moments == Moments::kFloat32, StoredFloat32<kArray>,
    std::conditional_t<moments == Moments::kBFloat16, StoredBFloat16<kArray>, RoundedBFloat16<kArray>>>;
}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_STORED_INL_H_
