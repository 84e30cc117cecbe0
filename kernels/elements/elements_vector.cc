// The vector kernels of elements.h: one source, compiled once per instruction set (SUPEROFFLOAD_TABLE names the table
// that it defines).
#define HWY_COMPILE_ONLY_STATIC
#include <cstring>

#include "kernels/elements/element_kernels.h"
#include "kernels/vector/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// Converts a range between two dtypes, one of which is fp32.
template <class From, class To>
HWY_INLINE void Convert(size_t n, const typename From::Element* from, typename To::Element* to) {
  const FloatTag d;
  const size_t vector = hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * vector <= n; i += 2 * vector) {
    To::StorePair(d, From::Load(d, from + i), From::Load(d, from + i + vector), to + i, /*stream=*/false);
  }
  for (; i + vector <= n; i += vector) To::Store(d, From::Load(d, from + i), to + i);
  if (i == n) return;
  HWY_ALIGN typename From::Element padded_from[kMaxLanes] = {};
  HWY_ALIGN typename To::Element padded_to[kMaxLanes];
  std::memcpy(padded_from, from + i, (n - i) * sizeof(*from));
  To::Store(d, From::Load(d, padded_from), padded_to);
  std::memcpy(to + i, padded_to, (n - i) * sizeof(*to));
}

void VectorNarrow(size_t n, const float* p, MutableElements theta) {
  WithCodec(theta.dtype, [&](auto t) {
    using T = decltype(t);
    Convert<Float32, T>(n, p, As<T>(theta));
  });
}

void VectorWiden(size_t n, ConstElements theta, float* p) {
  WithCodec(theta.dtype, [&](auto t) {
    using T = decltype(t);
    Convert<T, Float32>(n, As<T>(theta), p);
  });
}

void VectorAddSquares(size_t first, size_t n, ConstElements gradient, NormLanes& norm) {
  WithCodec(gradient.dtype, [&](auto g) {
    using G = decltype(g);
    const typename G::Element* from = As<G>(gradient);
    const FloatTag d;
    hn::Vec<DoubleTag> lanes0, lanes1, lanes2, lanes3;
    LoadLanes(norm, lanes0, lanes1, lanes2, lanes3);
    const size_t granule = Granule(), ahead = PrefetchElements();
    size_t i = first;
    for (; i + granule <= n; i += granule) {
      PrefetchAt(i + ahead, from);
      for (size_t j = 0; j < granule; j += hn::Lanes(d)) {
        AddSquaresOf(G::Load(d, from + i + j), j, lanes0, lanes1, lanes2, lanes3);
      }
    }
    if (i < n) {
      HWY_ALIGN typename G::Element padded[kMaxLanes] = {};
      std::memcpy(padded, from + i, (n - i) * sizeof(*padded));
      for (size_t j = 0; j < n - i; j += hn::Lanes(d)) {
        AddSquaresOf(G::Load(d, padded + j), j, lanes0, lanes1, lanes2, lanes3);
      }
    }
    StoreLanes(lanes0, lanes1, lanes2, lanes3, norm);
  });
}

}  // namespace

extern const ElementKernels SUPEROFFLOAD_TABLE;
const ElementKernels SUPEROFFLOAD_TABLE{SUPEROFFLOAD_TARGET, VectorAddSquares, VectorNarrow, VectorWiden};

}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();
