// The optimizer of resident buckets, whose state stays in the GPU's memory.
#include "kernels/adam/adam_element.h"
#include "kernels/cuda/kernels.cuh"

namespace superoffload::kernels {

extern "C" __global__ void __launch_bounds__(kResidentThreads) superoffload_resident_adam(ResidentArguments a) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < a.elements; i += stride) {
    const AdamElement e = UpdateElement(a.step, LoadElement(a.gradient, i), {a.state.p[i], a.state.m[i], a.state.v[i]});
    a.state.p[i] = e.p;
    a.state.m[i] = e.m;
    a.state.v[i] = e.v;
    StoreElement(a.theta, i, e.p);
  }
}

}  // namespace superoffload::kernels
