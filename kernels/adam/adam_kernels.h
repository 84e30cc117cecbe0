// The kernels of adam.h as a table, one per instruction set. adam.h calls the best one the machine has; tests compare
// them all.
#ifndef SUPEROFFLOAD_KERNELS_ADAM_ADAM_KERNELS_H_
#define SUPEROFFLOAD_KERNELS_ADAM_ADAM_KERNELS_H_

#include <vector>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {

struct AdamKernels {
  const char* target;
  decltype(&Deferred) deferred;
  decltype(&Republish) republish;
  decltype(&Settle) settle;
  decltype(&Plain) plain;
  decltype(&Narrow) narrow;
  decltype(&Widen) widen;
  decltype(&SumOfSquares) sum_of_squares;
};

// The specification: plain scalar C++. Also what runs on machines without the instruction sets below.
extern const AdamKernels kScalarKernels;

// Those this machine can run, the fastest first, the scalar one last.
const std::vector<const AdamKernels*>& SupportedAdamKernels();

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ADAM_ADAM_KERNELS_H_
