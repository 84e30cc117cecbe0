// Chooses the kernels for the machine, once.
#include "kernels/elements/elements.h"

#include <atomic>

#include "kernels/elements/element_kernels.h"
#include "kernels/targets.h"

namespace superoffload::kernels {

SUPEROFFLOAD_SUPPORTED_TABLES(SupportedElementKernels, ElementKernels, ElementKernels)

namespace {

std::atomic<size_t> prefetch_elements{512};

const ElementKernels& Best() {
  static const ElementKernels& best = *SupportedElementKernels().front();
  return best;
}

}  // namespace

void AddSquares(size_t first, size_t n, ConstElements gradient, NormLanes& norm) {
  Best().add_squares(first, n, gradient, norm);
}

double SumOfSquares(size_t n, ConstElements gradient) {
  NormLanes norm;
  AddSquares(0, n, gradient, norm);
  return norm.Sum();
}

void Narrow(size_t n, const float* p, MutableElements theta) { Best().narrow(n, p, theta); }

void Widen(size_t n, ConstElements theta, float* p) { Best().widen(n, theta, p); }

void SetPrefetchElements(size_t elements) { prefetch_elements.store(elements, std::memory_order_relaxed); }
size_t PrefetchElements() { return prefetch_elements.load(std::memory_order_relaxed); }

std::string_view KernelTarget() { return Best().target; }

}  // namespace superoffload::kernels
