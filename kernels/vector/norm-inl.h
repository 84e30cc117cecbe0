// The norm's eight lanes (NormLanes of elements.h) in vector registers.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_NORM_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_NORM_INL_H_

#include "kernels/vector/codecs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

using DoubleTag = hn::CappedTag<double, kNormLanes>;

// The lower and the upper half of a vector, in fp64.
HWY_INLINE hn::Vec<DoubleTag> PromoteLower(hn::Vec<FloatTag> x) {
  const DoubleTag dd;
#ifdef __ARM_FEATURE_SVE
  return svcvt_f64_f32_x(hn::FirstN(dd, hn::Lanes(dd)), svzip1_f32(x, x));
#else
  return hn::PromoteTo(dd, hn::LowerHalf(hn::Half<FloatTag>(), x));
#endif
}
HWY_INLINE hn::Vec<DoubleTag> PromoteUpper(hn::Vec<FloatTag> x) {
  const DoubleTag dd;
#ifdef __ARM_FEATURE_SVE
  // Not in a register that is longer than our vectors.
  if (svcntw() == hn::Lanes(FloatTag())) return svcvt_f64_f32_x(hn::FirstN(dd, hn::Lanes(dd)), svzip2_f32(x, x));
#endif
  return hn::PromoteTo(dd, hn::UpperHalf(hn::Half<FloatTag>(), x));
}

// Elements that one turn of the loops covers: eight, or one vector where that is longer.
HWY_INLINE size_t Granule() { return HWY_MAX(hn::Lanes(FloatTag()), kNormLanes); }

// How many vectors the lanes take depends on the instruction set: one, two or four.
template <class V>
HWY_INLINE void LoadLanes(const NormLanes& norm, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  const DoubleTag dd;
  const size_t n = hn::Lanes(dd);
  HWY_ALIGN double lanes[4 * kNormLanes] = {};
  for (size_t i = 0; i < kNormLanes; ++i) lanes[i] = norm.lanes[i];
  lanes0 = hn::LoadU(dd, lanes);
  lanes1 = hn::LoadU(dd, lanes + n);
  lanes2 = hn::LoadU(dd, lanes + 2 * n);
  lanes3 = hn::LoadU(dd, lanes + 3 * n);
}

template <class V>
HWY_INLINE void StoreLanes(V lanes0, V lanes1, V lanes2, V lanes3, NormLanes& norm) {
  const DoubleTag dd;
  const size_t n = hn::Lanes(dd);
  HWY_ALIGN double lanes[4 * kNormLanes];
  hn::StoreU(lanes0, dd, lanes);
  hn::StoreU(lanes1, dd, lanes + n);
  hn::StoreU(lanes2, dd, lanes + 2 * n);
  hn::StoreU(lanes3, dd, lanes + 3 * n);
  for (size_t i = 0; i < kNormLanes; ++i) norm.lanes[i] = lanes[i];
}

// Adds the squares of a vector of gradients, the granule's from element `first` on, to the lanes of their indices
// modulo 8.
template <class V>
HWY_INLINE void AddSquaresOf(hn::Vec<FloatTag> gradient, size_t first, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  const size_t n = hn::Lanes(DoubleTag());
  const auto lower = PromoteLower(gradient), upper = PromoteUpper(gradient);
  // The products are exact in fp64.
  if (n == kNormLanes) {
    lanes0 = hn::MulAdd(lower, lower, lanes0);
    lanes0 = hn::MulAdd(upper, upper, lanes0);
  } else if (first == 0) {
    lanes0 = hn::MulAdd(lower, lower, lanes0);
    lanes1 = hn::MulAdd(upper, upper, lanes1);
  } else {
    lanes2 = hn::MulAdd(lower, lower, lanes2);
    lanes3 = hn::MulAdd(upper, upper, lanes3);
  }
}

// `i` is an element ahead of the loop.
template <class... Elements>
HWY_INLINE void PrefetchAt(size_t i, const Elements*... arrays) {
  (hwy::Prefetch(arrays + i), ...);
}

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_NORM_INL_H_
