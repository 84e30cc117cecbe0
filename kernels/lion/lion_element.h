// One element of Lion (the formula of lion.h): the specification that every vector kernel equals, and what the GPU
// runs. Compiled by the host's compiler and by nvcc, which must neither contract (-fmad=false) nor flush subnormals.
#ifndef SUPEROFFLOAD_KERNELS_LION_LION_ELEMENT_H_
#define SUPEROFFLOAD_KERNELS_LION_LION_ELEMENT_H_

#include <cmath>

#include "kernels/elements/scalar_element.h"
#include "kernels/lion/lion.h"

namespace superoffload::kernels {

struct LionElement {
  using Step = LionStep;
  static constexpr size_t kArrays = 2;

  SUPEROFFLOAD_HOST_DEVICE static void Update(const LionStep& step, float gradient, float* element) {
    constexpr float kSmallestMomentum = 0x1p-100f;
    float &p = element[0], &m = element[1];
    const float g = gradient * step.gradient_scale;
    const float c = std::fma(step.beta1, m, step.one_minus_beta1 * g);
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c == 0 ? 0.0f : c;
    p = std::fma(-step.lr, sign, p * step.decay);
    m = std::fma(step.beta2, m, step.one_minus_beta2 * g);
    if (std::fabs(m) < kSmallestMomentum) m = 0;
  }
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_LION_LION_ELEMENT_H_
