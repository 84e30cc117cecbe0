// The scalar reference: the formula of adam.h, element by element. The vector kernels must equal it bit for bit.
#include <cmath>

#include "kernels/adam/adam_kernels.h"
#include "kernels/adam/undo_slot.h"
#include "kernels/float_conversion.h"

namespace superoffload::kernels {
namespace {

constexpr float kSmallestSquaredGradient = 0x1p-62f;
constexpr float kSmallestFirstMoment = 0x1p-100f;
constexpr float kSmallestSecondMoment = 0x1p-120f;

struct Element {
  float p, m, v;
};

float Load(ConstElements elements, size_t i) {
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

void Store(MutableElements elements, size_t i, float value) {
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

Element Update(const AdamStep& step, float gradient, Element e) {
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

double ScalarSumOfSquares(size_t n, ConstElements gradient) {
  double lanes[8] = {};
  for (size_t i = 0; i < n; ++i) {
    const double g = Load(gradient, i);
    lanes[i % 8] += g * g;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

void ScalarSettle(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, UndoSlot* undo,
                  size_t first) {
  for (size_t i = first; i < n; ++i) {
    const Element old{state.p[i], state.m[i], state.v[i]};
    if (undo != nullptr) {
      undo->p[i % kUndoElements] = old.p;
      undo->m[i % kUndoElements] = old.m;
      undo->v[i % kUndoElements] = old.v;
      KeepOrder();
      undo->torn = TornGranule(i, 1);
      KeepOrder();
    }
    const Element e = Update(absorb, Load(pending, i), old);
    state.p[i] = e.p;
    state.m[i] = e.m;
    state.v[i] = e.v;
  }
}

double ScalarRepublish(size_t n, AdamState state, const AdamStep& publish, ConstElements gradient,
                       MutableElements theta) {
  for (size_t i = 0; i < n; ++i) {
    Store(theta, i, Update(publish, Load(gradient, i), {state.p[i], state.m[i], state.v[i]}).p);
  }
  return ScalarSumOfSquares(n, gradient);
}

void ScalarNarrow(size_t n, const float* p, MutableElements theta) {
  for (size_t i = 0; i < n; ++i) Store(theta, i, p[i]);
}

void ScalarWiden(size_t n, ConstElements theta, float* p) {
  for (size_t i = 0; i < n; ++i) p[i] = Load(theta, i);
}

double ScalarDeferred(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, const AdamStep& publish,
                      ConstElements gradient, MutableElements theta, UndoSlot* undo) {
  ScalarSettle(n, state, absorb, pending, undo, 0);
  return ScalarRepublish(n, state, publish, gradient, theta);
}

void ScalarPlain(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, MutableElements theta) {
  ScalarSettle(n, state, absorb, pending, nullptr, 0);
  ScalarNarrow(n, state.p, theta);
}

}  // namespace

const AdamKernels kScalarKernels{"SCALAR",    ScalarDeferred, ScalarRepublish, ScalarSettle,
                                 ScalarPlain, ScalarNarrow,   ScalarWiden,     ScalarSumOfSquares};

}  // namespace superoffload::kernels
