// One element of Adam (the formula of adam.h): the specification that every vector kernel equals, and what the GPU
// runs. Compiled by the host's compiler and by nvcc, which must neither contract (-fmad=false) nor flush subnormals.
#ifndef SUPEROFFLOAD_KERNELS_ADAM_ADAM_ELEMENT_H_
#define SUPEROFFLOAD_KERNELS_ADAM_ADAM_ELEMENT_H_

#include <cmath>

#include "kernels/adam/adam.h"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {

struct AdamElement {
  using Step = AdamStep;
  static constexpr size_t kArrays = 3;

  SUPEROFFLOAD_HOST_DEVICE static void Update(const AdamStep& step, float gradient, float* element) {
    float &p = element[0], &m = element[1], &v = element[2];
    float g = gradient * step.gradient_scale;
    if (step.l2 != 0) g = std::fma(step.l2, p, g);
    const float g2 = std::fabs(g) < step.least_gradient ? 0 : g;
    m = std::fma(step.beta1, m, step.one_minus_beta1 * g);
    v = std::fma(step.beta2, v, step.one_minus_beta2 * (g2 * g2));
    if (std::fabs(m) < step.least_exp_avg) m = 0;
    if (v < step.least_exp_avg_sq) v = 0;
    const float denominator = std::fma(std::sqrt(v), step.inv_sqrt_bias_correction2, step.eps);
    p = std::fma(-step.step_size, m / denominator, p * step.decay);
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ADAM_ADAM_ELEMENT_H_
