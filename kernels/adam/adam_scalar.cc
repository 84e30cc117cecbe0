// The scalar reference: the formula of adam.h, element by element. The vector kernels must equal it bit for bit.
#include "kernels/adam/adam_element.h"
#include "kernels/adam/adam_kernels.h"
#include "kernels/adam/undo_slot.h"

namespace superoffload::kernels {
namespace {

double ScalarSumOfSquares(size_t n, ConstElements gradient) {
  double lanes[8] = {};
  for (size_t i = 0; i < n; ++i) {
    const double g = LoadElement(gradient, i);
    lanes[i % 8] += g * g;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

void ScalarSettle(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, UndoSlot* undo,
                  size_t first) {
  for (size_t i = first; i < n; ++i) {
    const AdamElement old{state.p[i], state.m[i], state.v[i]};
    if (undo != nullptr) {
      undo->p[i % kUndoElements] = old.p;
      undo->m[i % kUndoElements] = old.m;
      undo->v[i % kUndoElements] = old.v;
      KeepOrder();
      undo->torn = TornGranule(i, 1);
      KeepOrder();
    }
    const AdamElement e = UpdateElement(absorb, LoadElement(pending, i), old);
    state.p[i] = e.p;
    state.m[i] = e.m;
    state.v[i] = e.v;
  }
}

double ScalarRepublish(size_t n, AdamState state, const AdamStep& publish, ConstElements gradient,
                       MutableElements theta) {
  for (size_t i = 0; i < n; ++i) {
    StoreElement(theta, i, UpdateElement(publish, LoadElement(gradient, i), {state.p[i], state.m[i], state.v[i]}).p);
  }
  return ScalarSumOfSquares(n, gradient);
}

void ScalarNarrow(size_t n, const float* p, MutableElements theta) {
  for (size_t i = 0; i < n; ++i) StoreElement(theta, i, p[i]);
}

void ScalarWiden(size_t n, ConstElements theta, float* p) {
  for (size_t i = 0; i < n; ++i) p[i] = LoadElement(theta, i);
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
