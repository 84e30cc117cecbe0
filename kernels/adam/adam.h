// GraceAdam: Adam and AdamW, two algorithms (algorithm.h) of one formula. State: the master weight p and the moments
// m (exp_avg) and v (exp_avg_sq). One element, with every product that feeds an addition fused, in this order on every
// instruction set:
//
//   g = widen(gradient) * gradient_scale;   L2 form: g = fma(l2, p, g)
//   m = fma(beta1, m, (1-beta1) * g)
//   v = fma(beta2, v, (1-beta2) * (g2 * g2))         g2 = |g| < least_gradient ? 0 : g
//   m = |m| < least_exp_avg ? 0 : m;   v = v < least_exp_avg_sq ? 0 : v
//   p = fma(-step_size, m / fma(sqrt(v), inv_sqrt_bias_correction2, eps), p * decay)
//
// That is torch.optim.AdamW's update (Loshchilov & Hutter 2019, algorithm 2) up to the last few ulps. The three
// limits keep moments of parameters without gradients out of the subnormal range; they change no parameter while
// eps >= 1e-15, and are 0 with a smaller one.
//
// m and v may be kept in bf16 or 8 bits. They are rounded as they are stored: p moves by what they were before.
#ifndef SUPEROFFLOAD_KERNELS_ADAM_ADAM_H_
#define SUPEROFFLOAD_KERNELS_ADAM_ADAM_H_

#include <cstdint>

#include "kernels/algorithm.h"

namespace superoffload::kernels {

extern const Algorithm kAdamW;  // "adamw": decoupled weight decay
extern const Algorithm kAdam;   // "adam": weight decay as an L2 term of the gradient

// The same with moments in bf16, rounded stochastically, and to nearest.
extern const Algorithm kAdamWBFloat16, kAdamWBFloat16Nearest;  // "adamw_bf16", "adamw_bf16_nearest"
extern const Algorithm kAdamBFloat16, kAdamBFloat16Nearest;    // "adam_bf16", "adam_bf16_nearest"

// And as codes of 8 bits with a scale per block.
extern const Algorithm kAdamW8Bit, kAdam8Bit;  // "adamw_8bit", "adam_8bit"

// All but those to nearest with master weights in bf16, rounded stochastically: "..._bf16_masters".
extern const Algorithm kAdamWMasters16, kAdamWBFloat16Masters16, kAdamW8BitMasters16;
extern const Algorithm kAdamMasters16, kAdamBFloat16Masters16, kAdam8BitMasters16;

// The fp32 constants of one step of one parameter group.
struct AdamStep {
  float gradient_scale = 1;
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float step_size = 0;                  // lr / (1 - beta1^t)
  float inv_sqrt_bias_correction2 = 0;  // 1 / sqrt(1 - beta2^t)
  float eps = 0;
  float decay = 1;  // 1 - lr * weight_decay when decoupled
  float l2 = 0;     // weight_decay when L2
  float least_gradient = 0x1p-62f;
  float least_exp_avg = 0x1p-100f;
  float least_exp_avg_sq = 0x1p-120f;
  uint32_t step = 0;  // the parameter's, counted from 1; modulo 2^32

  bool operator==(const AdamStep&) const = default;
};

// The tables of both forms; the scalar ones are the specification.
extern const AlgorithmKernels kScalarAdamKernels;

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ADAM_ADAM_H_
