// The fp32 constants of a step, by one fixed recipe in fp64.
#include <cmath>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {
namespace {

// By repeated squaring: libm's pow differs between machines.
double Power(double base, uint64_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace

AdamStep MakeAdamStep(const AdamHyperparameters& h, uint64_t t, double gradient_scale) {
  AdamStep step;
  step.gradient_scale = static_cast<float>(gradient_scale);
  step.beta1 = static_cast<float>(h.beta1);
  step.one_minus_beta1 = static_cast<float>(1 - h.beta1);
  step.beta2 = static_cast<float>(h.beta2);
  step.one_minus_beta2 = static_cast<float>(1 - h.beta2);
  step.step_size = static_cast<float>(h.lr / (1 - Power(h.beta1, t)));
  step.inv_sqrt_bias_correction2 = static_cast<float>(1 / std::sqrt(1 - Power(h.beta2, t)));
  step.eps = static_cast<float>(h.eps);
  if (h.decay_form == WeightDecay::kDecoupled) {
    step.decay = static_cast<float>(1 - h.lr * h.weight_decay);
  } else {
    step.l2 = static_cast<float>(h.weight_decay);
  }
  return step;
}

}  // namespace superoffload::kernels
