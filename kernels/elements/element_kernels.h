// The kernels of elements.h as a table, one per instruction set. elements.h calls the best one the machine has; tests
// compare them all.
#ifndef SUPEROFFLOAD_KERNELS_ELEMENTS_ELEMENT_KERNELS_H_
#define SUPEROFFLOAD_KERNELS_ELEMENTS_ELEMENT_KERNELS_H_

#include <vector>

#include "kernels/elements/elements.h"

namespace superoffload::kernels {

struct ElementKernels {
  const char* target;
  decltype(&AddSquares) add_squares;
  decltype(&Narrow) narrow;
  decltype(&Widen) widen;
};

// The specification: plain scalar C++. Also what runs on machines without the instruction sets of targets.h.
extern const ElementKernels kScalarElementKernels;

// Those this machine can run, the fastest first, the scalar one last.
const std::vector<const ElementKernels*>& SupportedElementKernels();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ELEMENTS_ELEMENT_KERNELS_H_
