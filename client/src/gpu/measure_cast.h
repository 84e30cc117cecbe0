// Which cast policy moves a bucket's gradient off the GPU faster.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_MEASURE_CAST_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_MEASURE_CAST_H_

#include <cstdint>

#include "client/src/status.h"
#include "kernels/base/dtype.h"

namespace superoffload::client {

struct CastSeconds {
  double fused = 0;     // as it is
  double gpu_fp32 = 0;  // cast to fp32 while packing
};

// Seconds to pack one tensor of `elements` and to copy it to registered host memory, medians of a few rounds.
// UNAVAILABLE: no GPU. RESOURCE_EXHAUSTED: out of memory on either side.
Status MeasureCast(int ordinal, kernels::DType dtype, uint64_t elements, CastSeconds* seconds);

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_MEASURE_CAST_H_
