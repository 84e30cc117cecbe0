// Dynamic codes (codes/dynamic_code.h) in every lane of a vector, for the sources that are compiled once per
// instruction set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_DYNAMIC_CODE_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_DYNAMIC_CODE_INL_H_

#include "kernels/codes/dynamic_code.h"
#include "kernels/vector/codecs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

template <bool kSigned>
struct VectorCode {
  using Code = DynamicCode<kSigned>;
  using Floats = hn::Vec<FloatTag>;

  static HWY_INLINE Floats Decode(const uint8_t* codes, Floats scale) {
    const FloatTag d;
    const hn::RebindToSigned<FloatTag> di;
    const hn::RebindToUnsigned<FloatTag> du;
    const auto code = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint8_t, FloatTag>(), codes));
    const auto number = hn::ConvertTo(d, kSigned ? hn::And(code, hn::Set(di, 0x7f)) : code);
    const auto bits = hn::BitCast(du, number);
    const auto mantissa = hn::BitCast(d, hn::Or(hn::And(bits, hn::Set(du, 0x7fffff)), hn::Set(du, 0x3f800000)));
    const auto half = hn::Mul(hn::Set(d, 0.9f),
                              hn::BitCast(d, hn::Sub(hn::Set(du, 253u << 23), hn::And(bits, hn::Set(du, 0x7f800000)))));
    auto power = hn::Set(d, Code::kPower[0]);
    for (int decade = 1; decade < Code::kDecades; ++decade) {
      const auto there = hn::Ge(number, hn::Set(d, static_cast<float>(1 << (decade + Code::kExtra))));
      power = hn::IfThenElse(there, hn::Set(d, Code::kPower[decade]), power);
    }
    auto value = hn::Mul(hn::MulAdd(hn::Set(d, 0.9f), mantissa, hn::Sub(half, hn::Set(d, 0.8f))), power);
    if constexpr (kSigned) {
      const auto sign = hn::ShiftLeft<24>(hn::And(hn::BitCast(du, code), hn::Set(du, 0x80)));
      value = hn::BitCast(d, hn::Or(hn::BitCast(du, value), sign));
    }
    value = hn::IfThenZeroElse(hn::Eq(number, hn::Zero(d)), hn::Mul(value, scale));
    return hn::IfThenElse(hn::RebindMask(d, hn::Eq(code, hn::Set(di, Code::kOne))), scale, value);
  }

  static HWY_INLINE void Encode(Floats value, Floats inverse, uint8_t* to) {
    const FloatTag d;
    const hn::RebindToSigned<FloatTag> di;
    const hn::RebindToUnsigned<FloatTag> du;
    const auto relative = hn::Mul(value, inverse);
    const auto number = kSigned ? hn::Abs(relative) : relative;
    auto power = hn::Set(d, Code::kInverse[0]), codes = hn::Set(d, static_cast<float>(1 << Code::kExtra));
    for (int decade = 1; decade < Code::kDecades; ++decade) {
      const auto there = hn::Ge(number, hn::Set(d, Code::kLeast[decade]));
      power = hn::IfThenElse(there, hn::Set(d, Code::kInverse[decade]), power);
      codes = hn::IfThenElse(there, hn::Set(d, static_cast<float>(1 << (decade + Code::kExtra))), codes);
    }
    const auto steps =
        hn::Mul(hn::Sub(hn::Mul(number, power), hn::Set(d, 0.1f)), hn::Mul(codes, hn::Set(d, Code::kPerNinth)));
    const auto step = hn::Min(hn::Max(steps, hn::Zero(d)), hn::Sub(codes, hn::Set(d, 1.0f)));
    auto code = hn::Add(hn::ConvertTo(di, codes), hn::ConvertTo(di, step));
    auto one = hn::Set(di, static_cast<int32_t>(Code::kOne));
    if constexpr (kSigned) {
      const auto negative = hn::BitCast(di, hn::ShiftLeft<7>(hn::ShiftRight<31>(hn::BitCast(du, relative))));
      code = hn::Or(code, negative);
      one = hn::Add(one, hn::Sub(negative, hn::ShiftRight<7>(negative)));
    }
    code = hn::IfThenElse(hn::RebindMask(di, hn::Ge(number, hn::Set(d, Code::kLeastOne))), one, code);
    code = hn::IfThenElseZero(hn::RebindMask(di, hn::Ge(number, hn::Set(d, Code::kLeast[0]))), code);
    const hn::Rebind<uint8_t, FloatTag> d8;
    hn::StoreU(hn::DemoteTo(d8, code), d8, to);
  }
};

// The larger, and the smaller; of what is a NaN, none.
HWY_INLINE hn::Vec<FloatTag> LargerOf(hn::Vec<FloatTag> value, hn::Vec<FloatTag> largest) {
  return hn::IfThenElse(hn::Gt(value, largest), value, largest);
}
HWY_INLINE hn::Vec<FloatTag> SmallerOf(hn::Vec<FloatTag> value, hn::Vec<FloatTag> least) {
  return hn::IfThenElse(hn::Lt(value, least), value, least);
}

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_DYNAMIC_CODE_INL_H_
