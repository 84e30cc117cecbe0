// Dynamic codes of 8 bits (Dettmers 2015, "8-Bit Approximations for Parallelism in Deep Learning"; as used for moments
// by Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", section 2.2): seven decades below 1, the
// upper of which have the more codes. A block of numbers is stored as codes of what they are to its scale, that of them
// with the largest magnitude.
//
// The magnitude k of a signed code, 1 to 127, is in decade i = floor(log2(k)), that has 2^i codes, in equal steps:
//
//   value(k) = 10^(i-6) * (0.1 + 0.9 * (k / 2^i - 1 + 1 / 2^(i+1)))
//
// and code 128 is 1. Unsigned codes 2 to 255 are twice as many: decade i = floor(log2(k)) - 1, and code 1 is 1. Code 0
// is 0. These are the numbers of bitsandbytes' dynamic map, to six digits; bitsandbytes sorts its codes
// by value, and its scales have no sign, so that it rounds the largest magnitude of a block where that is of a negative
// number. Here what was decoded is encoded as it was, scale and codes, but in the subnormal range.
//
// A number becomes the code that is nearest; but no unsigned one that is not 0 becomes code 0: it may be divided by. A
// NaN becomes code 0.
#ifndef SUPEROFFLOAD_KERNELS_CODES_DYNAMIC_CODE_H_
#define SUPEROFFLOAD_KERNELS_CODES_DYNAMIC_CODE_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/algorithm.h"

namespace superoffload::kernels {

inline constexpr size_t kCodeBlock = 256;

// Of codes whose decade i has 2^(i + kExtra) of them.
template <bool kSigned>
struct DynamicCode {
  static constexpr int kDecades = 7, kExtra = kSigned ? 0 : 1;
  static constexpr uint32_t kOne = kSigned ? 128 : 1;

  // 10^(i-6) and its inverse.
  static constexpr float kPower[kDecades] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1};
  static constexpr float kInverse[kDecades] = {1e6f, 1e5f, 1e4f, 1e3f, 1e2f, 1e1f, 1};

  static constexpr double Value(int decade, int step) {
    const double steps = 1 << (decade + kExtra);
    return double{kPower[decade]} * (0.1 + 0.9 * (step + 0.5) / steps);
  }
  // The least number whose nearest code is in the decade; below that of decade 0 it is code 0.
  static constexpr float Least(int decade) {
    if (decade == 0) return kSigned ? static_cast<float>(Value(0, 0) / 2) : std::numeric_limits<float>::denorm_min();
    return static_cast<float>((Value(decade - 1, (1 << (decade - 1 + kExtra)) - 1) + Value(decade, 0)) / 2);
  }
  static constexpr float kLeast[kDecades] = {Least(0), Least(1), Least(2), Least(3), Least(4), Least(5), Least(6)};
  // From here on it is 1.
  static constexpr float kLeastOne =
      static_cast<float>((Value(kDecades - 1, (1 << (kDecades - 1 + kExtra)) - 1) + 1) / 2);

  static constexpr float kPerNinth = static_cast<float>(1 / 0.9);

  // A GPU has no arrays to look into.
  struct Decade {
    int index;
    float inverse;
  };
  // Of a number from kLeast[0] on.
  template <int kDecade = kDecades - 1>
  SUPEROFFLOAD_HOST_DEVICE static Decade DecadeOf(float number) {
    constexpr float least = Least(kDecade), inverse = kInverse[kDecade];
    if constexpr (kDecade == 0) {
      return {kDecade, inverse};
    } else {
      const Decade below = DecadeOf<kDecade - 1>(number);
      return {number >= least ? kDecade : below.index, number >= least ? inverse : below.inverse};
    }
  }
  template <int kDecade = kDecades - 1>
  SUPEROFFLOAD_HOST_DEVICE static float PowerOf(int decade) {
    constexpr float power = kPower[kDecade];
    if constexpr (kDecade > 0) {
      if (decade < kDecade) return PowerOf<kDecade - 1>(decade);
    }
    return power;
  }

  // Of `code` under `scale`.
  SUPEROFFLOAD_HOST_DEVICE static float Decode(uint8_t code, float scale) {
    const uint32_t magnitude = kSigned ? code & 0x7f : code;
    if (code == kOne) return scale;
    if (magnitude == 0) return 0;
    const float number = static_cast<float>(magnitude);
    const int exponent = static_cast<int>(std::bit_cast<uint32_t>(number) >> 23) - 127;
    const float mantissa = std::bit_cast<float>((std::bit_cast<uint32_t>(number) & 0x7fffff) | 0x3f800000);
    // Half a step of the decade: 0.9 / 2^(exponent + 1).
    const float half = 0.9f * std::bit_cast<float>(static_cast<uint32_t>(126 - exponent) << 23);
    const float value = std::fma(0.9f, mantissa, half - 0.8f) * PowerOf(exponent - kExtra);
    return kSigned && (code & 0x80) != 0 ? -value * scale : value * scale;
  }

  // `inverse`: 1 over the scale, or 0 where there is none.
  SUPEROFFLOAD_HOST_DEVICE static uint8_t Encode(float value, float inverse) {
    constexpr float least = Least(0);
    const float relative = value * inverse;
    const float number = kSigned ? std::fabs(relative) : relative;
    const bool negative = kSigned && std::signbit(relative);
    const bool is_zero = !(number >= least), is_one = number >= kLeastOne;
    // What is neither is in a decade. No branch: threads of a GPU take the same way.
    const float within = is_zero || is_one ? least : number;
    const Decade decade = DecadeOf(within);
    const int codes = 1 << (decade.index + kExtra);
    const float steps = (within * decade.inverse - 0.1f) * (static_cast<float>(codes) * kPerNinth);
    const int step = steps > 0 ? static_cast<int>(steps) : 0;
    const int magnitude = codes + (step < codes ? step : codes - 1);
    const int sign = negative ? 0x80 : 0;
    const int one = negative ? 0xff : kOne;  // there is no -1: the code before
    return static_cast<uint8_t>(is_zero ? 0 : is_one ? one : magnitude | sign);
  }

  // Of a block whose largest and least numbers are these, or 0.
  SUPEROFFLOAD_HOST_DEVICE static float ScaleOf(float largest, float least) {
    return largest >= -least ? largest : least;
  }
  SUPEROFFLOAD_HOST_DEVICE static float InverseOf(float scale) { return scale != 0 ? 1 / scale : 0; }

  static void DecodeBlock(size_t n, const void* codes, const void* scale, float* values) {
    for (size_t i = 0; i < n; ++i) {
      values[i] = Decode(static_cast<const uint8_t*>(codes)[i], *static_cast<const float*>(scale));
    }
  }
  static void EncodeBlock(size_t n, const float* values, void* codes, void* scale) {
    float largest = 0, least = 0;
    for (size_t i = 0; i < n; ++i) {
      if (values[i] > largest) largest = values[i];
      if (values[i] < least) least = values[i];
    }
    const float chosen = *static_cast<float*>(scale) = ScaleOf(largest, least);
    const float inverse = InverseOf(chosen);
    for (size_t i = 0; i < n; ++i) static_cast<uint8_t*>(codes)[i] = Encode(values[i], inverse);
  }

  static constexpr BlockCodec Codec(size_t scales) { return {scales, DecodeBlock, EncodeBlock}; }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CODES_DYNAMIC_CODE_H_
