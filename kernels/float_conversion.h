// Scalar conversions between fp32 and the 16-bit formats, by integer arithmetic so that every machine gives the same
// bits: widening is exact and makes NaNs quiet; narrowing rounds to nearest even, overflows to infinity, keeps
// subnormals and turns a NaN into the quiet NaN of its sign.
#ifndef SUPEROFFLOAD_KERNELS_FLOAT_CONVERSION_H_
#define SUPEROFFLOAD_KERNELS_FLOAT_CONVERSION_H_

#include <bit>
#include <cstdint>

namespace superoffload::kernels {

inline constexpr uint32_t kFloatInfinity = 0x7f800000;

// IEEE fp32 bits -> bf16 bits.
constexpr uint16_t NarrowToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > kFloatInfinity) return static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7fc0);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr float WidenBFloat16(uint16_t half) { return std::bit_cast<float>(static_cast<uint32_t>(half) << 16); }

// IEEE fp32 bits -> IEEE fp16 bits.
constexpr uint16_t NarrowToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > kFloatInfinity) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or more
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // normal in fp16
    half = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  } else {  // subnormal in fp16: the ulp of 0.5 + x is fp16's smallest step
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  }
  return static_cast<uint16_t>(sign | half);
}

constexpr float WidenFloat16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  uint32_t bits;
  if (magnitude > 0x7c00) {
    bits = magnitude << 13 | 0x7fc00000;
  } else if (magnitude == 0x7c00) {
    bits = kFloatInfinity;
  } else if (magnitude >= 0x400) {
    bits = (magnitude << 13) + (112u << 23);
  } else {
    bits = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  }
  return std::bit_cast<float>(sign | bits);
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_FLOAT_CONVERSION_H_
