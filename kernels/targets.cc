#include "kernels/targets.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace superoffload::kernels {

bool MachineRuns([[maybe_unused]] Target target) {
#if defined(__x86_64__)
  // x86-64-v4 and x86-64-v3: what the two objects are compiled for.
  if (target == Target::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512vl");
  }
  if (target == Target::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  }
#elif defined(__aarch64__)
  constexpr int kFixedBytes = 16;
  const bool sve2 = (::getauxval(AT_HWCAP2) & HWCAP2_SVE2) != 0;
  if (target == Target::kNeon) return true;
  if (target == Target::kSve2) return sve2;
  // Vectors of exactly 128 bits, as on Grace: fewer instructions.
  if (target == Target::kSve2Fixed128) return sve2 && (::prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK) == kFixedBytes;
#endif
  return false;
}

}  // namespace superoffload::kernels
