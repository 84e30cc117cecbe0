// Chooses the kernels for the machine, once.
#include "kernels/adam/adam.h"

#include <atomic>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include "kernels/adam/adam_kernels.h"

namespace superoffload::kernels {

#if defined(__x86_64__)
extern const AdamKernels kAvx2Kernels;
extern const AdamKernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const AdamKernels kNeonKernels;
extern const AdamKernels kSve2Kernels;
extern const AdamKernels kSve2Fixed128Kernels;  // for vectors of exactly 128 bits, as on Grace: fewer instructions
#endif

const std::vector<const AdamKernels*>& SupportedAdamKernels() {
  static const std::vector<const AdamKernels*> supported = [] {
    std::vector<const AdamKernels*> kernels;
#if defined(__x86_64__)
    // x86-64-v4 and x86-64-v3: what the two objects were compiled for.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl")) {
      kernels.push_back(&kAvx512Kernels);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
      kernels.push_back(&kAvx2Kernels);
    }
#elif defined(__aarch64__)
    if (::getauxval(AT_HWCAP2) & HWCAP2_SVE2) {
      constexpr int kFixedBytes = 16;
      if ((::prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK) == kFixedBytes) kernels.push_back(&kSve2Fixed128Kernels);
      kernels.push_back(&kSve2Kernels);
    }
    kernels.push_back(&kNeonKernels);
#endif
    kernels.push_back(&kScalarKernels);
    return kernels;
  }();
  return supported;
}

namespace {

std::atomic<size_t> prefetch_elements{512};

const AdamKernels& Best() {
  static const AdamKernels& best = *SupportedAdamKernels().front();
  return best;
}

}  // namespace

double Deferred(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, const AdamStep& publish,
                ConstElements gradient, MutableElements theta, UndoSlot* undo) {
  return Best().deferred(n, state, absorb, pending, publish, gradient, theta, undo);
}

double Republish(size_t n, AdamState state, const AdamStep& publish, ConstElements gradient, MutableElements theta) {
  return Best().republish(n, state, publish, gradient, theta);
}

void Settle(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, UndoSlot* undo, size_t first) {
  Best().settle(n, state, absorb, pending, undo, first);
}

void Plain(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, MutableElements theta) {
  Best().plain(n, state, absorb, pending, theta);
}

void Narrow(size_t n, const float* p, MutableElements theta) { Best().narrow(n, p, theta); }

void Widen(size_t n, ConstElements theta, float* p) { Best().widen(n, theta, p); }

double SumOfSquares(size_t n, ConstElements gradient) { return Best().sum_of_squares(n, gradient); }

void SetPrefetchElements(size_t elements) { prefetch_elements.store(elements, std::memory_order_relaxed); }

size_t PrefetchElements() { return prefetch_elements.load(std::memory_order_relaxed); }

std::string_view KernelTarget() { return Best().target; }

}  // namespace superoffload::kernels
