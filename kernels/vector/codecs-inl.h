// Vectors of fp32 from and to memory of each dtype, for the sources that are compiled once per instruction set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_CODECS_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_CODECS_INL_H_

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/elements/elements.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t kMaxLanes = 16;
using FloatTag = hn::CappedTag<float, kMaxLanes>;

// What highway has no single operation for. SVE has: there, these are what one would write by hand (README.md of
// kernels/bench counts).
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> LoadHalves([[maybe_unused]] D d, const uint16_t* from) {
  const hn::RebindToUnsigned<D> du;
#ifdef __ARM_FEATURE_SVE
  return svld1uh_u32(hn::FirstN(du, hn::Lanes(d)), from);
#else
  return hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint16_t, D>(), from));
#endif
}

// Codecs: vectors of fp32 from and to memory of each dtype. `stream` stores past the caches to aligned memory, without
// reading what is overwritten. StorePair stores two vectors, one behind the other. See float_conversion.h for the
// rules.
struct Float32 {
  using Element = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const float* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, float* to, bool stream = false) {
    stream ? hn::Stream(value, d, to) : hn::StoreU(value, d, to);
  }
  template <class D>
  static HWY_INLINE void StorePair(D d, hn::Vec<D> lower, hn::Vec<D> upper, float* to, bool stream) {
    Store(d, lower, to, stream);
    Store(d, upper, to + hn::Lanes(d), stream);
  }
};

template <class D, class VU>
HWY_INLINE void StoreHalves(D, VU halves, uint16_t* to, bool stream) {
  const hn::Rebind<uint16_t, D> dh;
  const auto narrow = hn::DemoteTo(dh, hn::BitCast(hn::RebindToSigned<D>(), halves));
  stream ? hn::Stream(narrow, dh, to) : hn::StoreU(narrow, dh, to);
}

struct BFloat16 {
  using Element = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
    return hn::BitCast(d, hn::ShiftLeft<16>(LoadHalves(d, from)));
  }
  // Of what is no NaN, in the upper half of each lane.
  template <class D>
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> Round(D, hn::Vec<D> value) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    return hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff)));
  }
  // What `value` was rounded to, in the upper half of each lane; of a NaN anything.
  template <class D>
  static HWY_INLINE void StoreRounded(D d, hn::Vec<D> value, hn::Vec<hn::RebindToUnsigned<D>> rounded, uint16_t* to,
                                      bool stream) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, value);
    const auto quiet = hn::Or(hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000)), hn::Set(du, 0x7fc0));
    const auto nan = hn::RebindMask(du, hn::IsNaN(value));
    StoreHalves(d, hn::IfThenElse(nan, quiet, hn::ShiftRight<16>(rounded)), to, stream);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, bool stream = false) {
    StoreRounded(d, value, Round(d, value), to, stream);
  }
  // Together they need one test for a NaN, which the sum has if one of them does, and one instruction to narrow.
  template <class D>
  static HWY_INLINE void StorePair(D d, hn::Vec<D> lower, hn::Vec<D> upper, uint16_t* to, bool stream) {
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(hn::Add(lower, upper))))) {
      Store(d, lower, to, stream);
      Store(d, upper, to + hn::Lanes(d), stream);
      return;
    }
    const hn::Repartition<uint16_t, D> dh;
    const auto narrow = hn::ConcatOdd(dh, hn::BitCast(dh, Round(d, upper)), hn::BitCast(dh, Round(d, lower)));
    stream ? hn::Stream(narrow, dh, to) : hn::StoreU(narrow, dh, to);
  }
};

struct Float16 {
  using Element = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto half = LoadHalves(d, from);
    const auto magnitude = hn::And(half, hn::Set(du, 0x7fff));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000)));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(du, 112u << 23));
    const auto subnormal = hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24f)));
    const auto special = hn::Or(shifted, hn::Set(du, 0x7f800000));
    const auto quiet = hn::Or(special, hn::Set(du, 0x00400000));
    auto bits = hn::IfThenElse(hn::Gt(hn::Set(du, 0x400), magnitude), subnormal, normal);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7bff)), special, bits);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7c00)), quiet, bits);
    return hn::BitCast(d, hn::Or(sign, bits));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, bool stream = false) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, value);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(du, 0xfff)));
    const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))), hn::Set(du, 0x3f000000));
    auto half = hn::IfThenElse(hn::Gt(hn::Set(du, 0x38800000), magnitude), subnormal, normal);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477fefff)), hn::Set(du, 0x7c00), half);
    half = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), hn::Set(du, 0x7e00), half);
    StoreHalves(d, hn::Or(sign, half), to, stream);
  }
  template <class D>
  static HWY_INLINE void StorePair(D d, hn::Vec<D> lower, hn::Vec<D> upper, uint16_t* to, bool stream) {
    Store(d, lower, to, stream);
    Store(d, upper, to + hn::Lanes(d), stream);
  }
};

// Calls `visit` with the codec of a run-time dtype.
template <class Visit>
HWY_INLINE auto WithCodec(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(BFloat16());
    case DType::kFloat16:
      return visit(Float16());
    case DType::kFloat32:
    case DType::kUInt8:
      break;
  }
  return visit(Float32());
}

template <class G>
HWY_INLINE const typename G::Element* As(ConstElements elements) {
  return static_cast<const typename G::Element*>(elements.data);
}
template <class T>
HWY_INLINE typename T::Element* As(MutableElements elements) {
  return static_cast<typename T::Element*>(elements.data);
}

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_CODECS_INL_H_
