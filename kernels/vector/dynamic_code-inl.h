// Dynamic codes (codes/dynamic_code.h) in every lane of a vector, for the sources that are compiled once per
// instruction set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_DYNAMIC_CODE_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_DYNAMIC_CODE_INL_H_

#include <cstdint>
#include <limits>

#include "kernels/codes/dynamic_code.h"
#include "kernels/vector/codecs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// A number per decade. Behind them zeros, where vectors are longer.
struct DecadeTable {
  static constexpr uint32_t kEntries = 8;
  alignas(64) float entries[2 * kMaxLanes] = {};

  // What each lane asks for, by an index below kEntries.
  HWY_INLINE hn::Vec<FloatTag> At(hn::Vec<hn::RebindToUnsigned<FloatTag>> indices) const {
    [[maybe_unused]] const FloatTag d;
#if defined(__ARM_FEATURE_SVE2)
    return svtbl2_f32(svcreate2_f32(hn::Load(d, entries), hn::Load(d, entries + hn::Lanes(d))), indices);
#elif defined(__ARM_NEON)
    static_assert(hn::MaxLanes(FloatTag()) == kEntries / 2);
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), indices.raw, 0x04040404);
    const uint8x16x2_t table = {vreinterpretq_u8_f32(vld1q_f32(entries)), vreinterpretq_u8_f32(vld1q_f32(entries + 4))};
    return hn::Vec<FloatTag>(vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes))));
#else
    // IndicesFromVec looks at the indices where Highway is built for debugging, and needs its library then.
    return hn::TableLookupLanes(hn::Load(d, entries), decltype(hn::IndicesFromVec(d, indices)){indices.raw});
#endif
  }
};

template <bool kSigned>
struct VectorCode {
  using Code = DynamicCode<kSigned>;
  using Floats = hn::Vec<FloatTag>;

  static constexpr uint32_t kLastEntry = DecadeTable::kEntries - 1;

  // By the exponent of a code's magnitude as fp32 has it, modulo kEntries.
  static constexpr DecadeTable kPowers = [] {
    DecadeTable table;
    for (int decade = 0; decade < Code::kDecades; ++decade) {
      table.entries[(127 + Code::kExtra + decade) & kLastEntry] = Code::kPower[decade];
    }
    return table;
  }();

  // By decade: the least number of the one above, and 10^(6-i).
  static constexpr DecadeTable kNext = [] {
    DecadeTable table;
    for (uint32_t i = 0; i < DecadeTable::kEntries; ++i) {
      table.entries[i] = i + 1 < Code::kDecades ? Code::kLeast[i + 1] : std::numeric_limits<float>::infinity();
    }
    return table;
  }();
  static constexpr DecadeTable kInverses = [] {
    DecadeTable table;
    for (int decade = 0; decade < Code::kDecades; ++decade) table.entries[decade] = Code::kInverse[decade];
    return table;
  }();

  // The bits of an fp32 number are its logarithm, but for a straight line within each power of two: 7 + log10(number)
  // is bits * kLog10PerBit + 7 - 127 * log10(2), and at most 0.03 more. A decade begins where it is 0.01 to 0.28 above
  // a whole number. So 0.77 less, rounded down, is the decade or the one before; rounded to nearest it is another 0.5
  // less.
  static constexpr float kLog10PerBit = static_cast<float>(0.30102999566 / (1 << 23));
  static constexpr float kWhole = 1 << 23;            // from here on fp32 has no fractions, and halves before
  static constexpr float kLog10Of1 = kWhole - 32.5f;  // 7 - 127 * log10(2) - 0.77 - 0.5

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
    const auto power = kPowers.At(hn::And(hn::ShiftRight<23>(bits), hn::Set(du, kLastEntry)));
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
    const auto rounded =
        hn::Max(hn::MulAdd(hn::ConvertTo(d, hn::BitCast(di, number)), hn::Set(d, kLog10PerBit), hn::Set(d, kLog10Of1)),
                hn::Set(d, kWhole));
    auto decade = hn::And(hn::BitCast(di, rounded), hn::Set(di, int32_t{kLastEntry}));
    const auto above = hn::Ge(number, kNext.At(hn::BitCast(du, decade)));
    decade = hn::Sub(decade, hn::VecFromMask(di, hn::RebindMask(di, above)));
    const auto power = kInverses.At(hn::BitCast(du, decade));
    const auto codes = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(decade, hn::Set(di, 127 + Code::kExtra))));
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
