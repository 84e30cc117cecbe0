// The optimizer of resident buckets, whose state stays in the GPU's memory: one kernel per formula. Algorithms name
// theirs (Algorithm::resident_kernel).
#include "kernels/adam/adam_element.h"
#include "kernels/cuda/kernels.cuh"
#include "kernels/lion/lion_element.h"

#define SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(X) \
  X(superoffload_resident_adam, AdamElement)     \
  X(superoffload_resident_lion, LionElement)

namespace superoffload::kernels {
inline namespace residents {  // named, as in pack.cu

template <class F>
__device__ void RunResident(const ResidentArguments& a) {
  const auto step = a.constants.As<typename F::Step>();
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < a.elements; i += stride) {
    float element[F::kArrays];
    for (size_t array = 0; array < F::kArrays; ++array) element[array] = a.state.Floats(array)[i];
    F::Update(step, LoadElement(a.gradient, i), element);
    for (size_t array = 0; array < F::kArrays; ++array) a.state.Floats(array)[i] = element[array];
    StoreElement(a.theta, i, element[0]);
  }
}

}  // namespace residents

#define SUPEROFFLOAD_RESIDENT_KERNEL(name, Formula)                                                  \
  extern "C" __global__ void __launch_bounds__(kResidentThreads) name(ResidentArguments arguments) { \
    RunResident<Formula>(arguments);                                                                 \
  }
SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(SUPEROFFLOAD_RESIDENT_KERNEL)

}  // namespace superoffload::kernels
