// What the loops of passes have in common, whatever their grain: what they are called with, gradients in and parameters
// out in any dtype. For the sources that are compiled once per instruction set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_CALL_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_CALL_INL_H_

#include <cstring>

#include "kernels/algorithm.h"
#include "kernels/undo_slot.h"
#include "kernels/vector/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

// Tuning, explained in kernels/bench/README.md. Changes no result.
#ifndef SUPEROFFLOAD_BLOCK_ELEMENTS
#define SUPEROFFLOAD_BLOCK_ELEMENTS 256
#endif

// Elements that go through the stages of a pass together: their state stays in L1 between them.
constexpr size_t kBlockElements = SUPEROFFLOAD_BLOCK_ELEMENTS;

// Of streamed stores, on every instruction set.
constexpr size_t kStreamAlignment = 64;

// Zero where |x| < limit, else x; a NaN stays what it is.
template <class D, class V>
HWY_INLINE V FlushBelow(D d, float limit, V x) {
#ifdef __ARM_FEATURE_SVE
  return svsel_f32(svaclt_n_f32(hn::FirstN(d, hn::Lanes(d)), x, limit), hn::Zero(d), x);
#else
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(x), hn::Set(d, limit)), x);
#endif
}

// A dtype that is looked at once per block, in the place of a codec.
struct AnyDType {};

// The gradient of a pass, in the dtype of codec C. Open gives `n` elements from `first` on, for Load; the buffer has
// room for a block.
template <class C>
struct GradientIn {
  const typename C::Element* data;

  explicit GradientIn(ConstElements elements) : data(As<C>(elements)) {}
  HWY_INLINE void Prefetch(size_t i) const { PrefetchAt(i, data); }
  HWY_INLINE const typename C::Element* Open(size_t first, size_t, float*) const { return data + first; }
  static HWY_INLINE hn::Vec<FloatTag> Load(const typename C::Element* from) { return C::Load(FloatTag(), from); }
};

template <>
struct GradientIn<AnyDType> {
  ConstElements elements;

  explicit GradientIn(ConstElements elements) : elements(elements) {}
  HWY_INLINE void Prefetch(size_t i) const {
    PrefetchAt(i * DTypeBytes(elements.dtype), static_cast<const std::byte*>(elements.data));
  }
  HWY_NOINLINE const float* Open(size_t first, size_t n, float* buffer) const {
    WithCodec(elements.dtype, [&](auto c) {
      using C = decltype(c);
      const FloatTag d;
      for (size_t i = 0; i < n; i += hn::Lanes(d)) hn::Store(C::Load(d, As<C>(elements) + first + i), d, buffer + i);
    });
    return buffer;
  }
  static HWY_INLINE hn::Vec<FloatTag> Load(const float* from) { return hn::Load(FloatTag(), from); }
};

// The published parameters of a pass, in the dtype of codec C. Store takes `n` from `first` on, with `streams` past the
// caches where that is possible.
template <class C>
struct ThetaOut {
  typename C::Element* data;

  explicit ThetaOut(MutableElements elements) : data(As<C>(elements)) {}
  HWY_INLINE void Store(const float* from, size_t first, size_t n, bool streams) const {
    const FloatTag d;
    const size_t vector = hn::Lanes(d);
    const bool stream = streams && reinterpret_cast<uintptr_t>(data) % kStreamAlignment == 0;
    size_t i = 0;
    for (; i + 2 * vector <= n; i += 2 * vector) {
      C::StorePair(d, hn::LoadU(d, from + i), hn::LoadU(d, from + i + vector), data + first + i, stream);
    }
    if (i < n) C::Store(d, hn::LoadU(d, from + i), data + first + i, stream);
  }
};

template <>
struct ThetaOut<AnyDType> {
  MutableElements elements;

  explicit ThetaOut(MutableElements elements) : elements(elements) {}
  HWY_NOINLINE void Store(const float* from, size_t first, size_t n, bool streams) const {
    WithCodec(elements.dtype, [&](auto c) { ThetaOut<decltype(c)>(elements).Store(from, first, n, streams); });
  }
};

// What a pass does. norm: adds up the squares of what it publishes.
struct Kind {
  bool absorb = false, publish = false, norm = false, theta = false;
  bool padded = false;  // runs on a short copy, beyond which nothing may be prefetched and nothing is to be undone
};

// What one call of a pass works on, as algorithm.h has it.
struct Call {
  size_t first, n;
  const StateView& state;
  StepConstants absorb = {};
  ConstElements pending = {};
  StepConstants publish = {};
  ConstElements gradient = {};
  MutableElements theta = {};
  NormLanes* norm = nullptr;
  UndoSlot* undo = nullptr;
};

// Fewer entries of an array than a granule has, with zeros behind them.
struct alignas(64) PaddedEntries {
  std::byte bytes[kMaxLanes * sizeof(float)] = {};

  void* From(const void* array, size_t first, size_t n, DType dtype) {
    std::memcpy(bytes, static_cast<const std::byte*>(array) + first * DTypeBytes(dtype), n * DTypeBytes(dtype));
    return bytes;
  }
  void To(void* array, size_t first, size_t n, DType dtype) const {
    std::memcpy(static_cast<std::byte*>(array) + first * DTypeBytes(dtype), bytes, n * DTypeBytes(dtype));
  }
};

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_CALL_INL_H_
