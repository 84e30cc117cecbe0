// One element of Adam (the formula of adam.h): the specification that every vector kernel equals, and what the GPU
// runs. Compiled by the host's compiler and by nvcc, which must neither contract (-fmad=false) nor flush subnormals.
#ifndef SUPEROFFLOAD_KERNELS_ADAM_ADAM_ELEMENT_H_
#define SUPEROFFLOAD_KERNELS_ADAM_ADAM_ELEMENT_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/adam/adam.h"
#include "kernels/float_conversion.h"

#ifdef __CUDACC__
#define SUPEROFFLOAD_HOST_DEVICE __host__ __device__
#else
#define SUPEROFFLOAD_HOST_DEVICE
#endif

namespace superoffload::kernels {

struct AdamElement {
  float p, m, v;
};

SUPEROFFLOAD_HOST_DEVICE inline float LoadElement(ConstElements elements, size_t i) {
  switch (elements.dtype) {
    case DType::kBFloat16:
      return WidenBFloat16(static_cast<const uint16_t*>(elements.data)[i]);
    case DType::kFloat16:
      return WidenFloat16(static_cast<const uint16_t*>(elements.data)[i]);
    case DType::kFloat32:
      break;
  }
  return static_cast<const float*>(elements.data)[i];
}

SUPEROFFLOAD_HOST_DEVICE inline void StoreElement(MutableElements elements, size_t i, float value) {
  switch (elements.dtype) {
    case DType::kBFloat16:
      static_cast<uint16_t*>(elements.data)[i] = NarrowToBFloat16(value);
      return;
    case DType::kFloat16:
      static_cast<uint16_t*>(elements.data)[i] = NarrowToFloat16(value);
      return;
    case DType::kFloat32:
      break;
  }
  static_cast<float*>(elements.data)[i] = value;
}

SUPEROFFLOAD_HOST_DEVICE inline AdamElement UpdateElement(const AdamStep& step, float gradient, AdamElement e) {
  constexpr float kSmallestSquaredGradient = 0x1p-62f;
  constexpr float kSmallestFirstMoment = 0x1p-100f;
  constexpr float kSmallestSecondMoment = 0x1p-120f;
  float g = gradient * step.gradient_scale;
  if (step.l2 != 0) g = std::fma(step.l2, e.p, g);
  const float g2 = std::fabs(g) < kSmallestSquaredGradient ? 0 : g;
  e.m = std::fma(step.beta1, e.m, step.one_minus_beta1 * g);
  e.v = std::fma(step.beta2, e.v, step.one_minus_beta2 * (g2 * g2));
  if (std::fabs(e.m) < kSmallestFirstMoment) e.m = 0;
  if (e.v < kSmallestSecondMoment) e.v = 0;
  const float denominator = std::fma(std::sqrt(e.v), step.inv_sqrt_bias_correction2, step.eps);
  e.p = std::fma(-step.step_size, e.m / denominator, e.p * step.decay);
  return e;
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ADAM_ADAM_ELEMENT_H_
