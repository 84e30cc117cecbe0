#include "kernels/bench/baselines.h"

namespace superoffload::kernels {

#if defined(__x86_64__)
extern const Baselines kAvx2Baselines;
extern const Baselines kAvx512Baselines;
#elif defined(__aarch64__)
extern const Baselines kNeonBaselines;
extern const Baselines kSve2Baselines;
extern const Baselines kSve2Fixed128Baselines;
#endif

const Baselines* BaselinesForThisMachine() {
#if defined(__x86_64__)
  if (KernelTarget() == "AVX512") return &kAvx512Baselines;
  if (KernelTarget() == "AVX2") return &kAvx2Baselines;
#elif defined(__aarch64__)
  if (KernelTarget() == "SVE2FIXED128") return &kSve2Fixed128Baselines;
  if (KernelTarget() == "SVE2") return &kSve2Baselines;
  if (KernelTarget() == "NEON") return &kNeonBaselines;
#endif
  return nullptr;
}

}  // namespace superoffload::kernels
