// The scalar reference of elements.h. The vector kernels must equal it bit for bit.
#include "kernels/elements/element_kernels.h"
#include "kernels/elements/scalar_element.h"

namespace superoffload::kernels {
namespace {

void ScalarAddSquares(size_t first, size_t n, ConstElements gradient, NormLanes& norm) {
  for (size_t i = first; i < n; ++i) {
    const double g = LoadElement(gradient, i);
    norm.lanes[i % kNormLanes] += g * g;  // the product is exact in fp64
  }
}

void ScalarNarrow(size_t n, const float* p, MutableElements theta) {
  for (size_t i = 0; i < n; ++i) StoreElement(theta, i, p[i]);
}

void ScalarWiden(size_t n, ConstElements theta, float* p) {
  for (size_t i = 0; i < n; ++i) p[i] = LoadElement(theta, i);
}

}  // namespace

const ElementKernels kScalarElementKernels{"SCALAR", ScalarAddSquares, ScalarNarrow, ScalarWiden};

}  // namespace superoffload::kernels
