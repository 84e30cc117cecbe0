// Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", program 1). State: the master weight p and
// the momentum m (exp_avg). One element, with every product that feeds an addition fused, in this order on every
// instruction set:
//
//   g = widen(gradient) * gradient_scale
//   c = fma(beta1, m, (1-beta1) * g)
//   p = fma(-lr, sign(c), p * decay)                 sign(0) = 0; a NaN stays one
//   m = fma(beta2, m, (1-beta2) * g);   m = |m| < 2^-100 ? 0 : m
//
// m may be kept in bf16, and is rounded as it is stored.
#ifndef SUPEROFFLOAD_KERNELS_LION_LION_H_
#define SUPEROFFLOAD_KERNELS_LION_LION_H_

#include "kernels/algorithm.h"

namespace superoffload::kernels {

extern const Algorithm kLion;                                // "lion"
extern const Algorithm kLionBFloat16, kLionBFloat16Nearest;  // "lion_bf16", "lion_bf16_nearest": m in bf16
extern const Algorithm kLion8Bit;                            // "lion_8bit": m as codes of 8 bits

// All but those to nearest with master weights in bf16, rounded stochastically: "..._bf16_masters".
extern const Algorithm kLionMasters16, kLionBFloat16Masters16, kLion8BitMasters16;

// The fp32 constants of one step of one parameter group.
struct LionStep {
  float gradient_scale = 1;
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float lr = 0;
  float decay = 1;    // 1 - lr * weight_decay
  uint32_t step = 0;  // the parameter's, counted from 1; modulo 2^32
};

extern const AlgorithmKernels kScalarLionKernels;

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_LION_LION_H_
