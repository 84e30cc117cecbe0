// The vector kernels: one source, compiled once per instruction set (SUPEROFFLOAD_KERNELS names the table it defines).
//
// The loop runs over granules of 8 elements, or of one vector where that is longer, because the norm's eight lanes are
// element indices modulo 8. What is left at the end goes through zero-padded buffers and the same code, so
// that nothing beyond the spans is touched; zeros add nothing to the norm.
#define HWY_COMPILE_ONLY_STATIC
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/adam/adam_kernels.h"
#include "kernels/adam/undo_slot.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Tuning, explained in kernels/bench/README.md. Changes no result.
#ifndef SUPEROFFLOAD_BLOCK_ELEMENTS
#define SUPEROFFLOAD_BLOCK_ELEMENTS 256
#endif

// Elements that go through the stages of a pass together: their state stays in L1 between them.
constexpr size_t kBlockElements = SUPEROFFLOAD_BLOCK_ELEMENTS;

// Of streamed stores, on every instruction set.
constexpr size_t kStreamAlignment = 64;

constexpr size_t kNormLanes = 8;
constexpr size_t kMaxLanes = 16;
using FloatTag = hn::CappedTag<float, kMaxLanes>;
using DoubleTag = hn::CappedTag<double, kNormLanes>;

// What highway has no single operation for. SVE has: there, these are what one would write by hand (README.md of
// kernels/bench counts).
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> LoadHalves([[maybe_unused]] D d, const uint16_t* from) {
  const hn::RebindToUnsigned<D> du;
#ifdef __ARM_FEATURE_SVE
  return svld1uh_u32(hn::FirstN(du, hn::Lanes(d)), from);
#else
  return hn::PromoteTo(du, hn::LoadU(hn::Rebind<uint16_t, D>(), from));
#endif
}

// Zero where |x| < limit, else x; a NaN stays what it is.
template <class D, class V>
HWY_INLINE V FlushBelow(D d, float limit, V x) {
#ifdef __ARM_FEATURE_SVE
  return svsel_f32(svaclt_n_f32(hn::FirstN(d, hn::Lanes(d)), x, limit), hn::Zero(d), x);
#else
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(x), hn::Set(d, limit)), x);
#endif
}

// Codecs: vectors of fp32 from and to memory of each dtype. `stream` stores past the caches to aligned memory, without
// reading what is overwritten. See float_conversion.h for the rules.
struct Float32 {
  using Element = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const float* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, float* to, bool stream = false) {
    stream ? hn::Stream(value, d, to) : hn::StoreU(value, d, to);
  }
};

template <class D, class VU>
HWY_INLINE void StoreHalves(D, VU halves, uint16_t* to, bool stream) {
  const hn::Rebind<uint16_t, D> dh;
  const auto narrow = hn::DemoteTo(dh, hn::BitCast(hn::RebindToSigned<D>(), halves));
  stream ? hn::Stream(narrow, dh, to) : hn::StoreU(narrow, dh, to);
}

struct BFloat16 {
  using Element = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
    return hn::BitCast(d, hn::ShiftLeft<16>(LoadHalves(d, from)));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, bool stream = false) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
    const auto quiet = hn::Or(hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000)), hn::Set(du, 0x7fc0));
    const auto nan = hn::RebindMask(du, hn::IsNaN(value));
    StoreHalves(d, hn::IfThenElse(nan, quiet, rounded), to, stream);
  }
};

struct Float16 {
  using Element = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const uint16_t* from) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto half = LoadHalves(d, from);
    const auto magnitude = hn::And(half, hn::Set(du, 0x7fff));
    const auto sign = hn::ShiftLeft<16>(hn::And(half, hn::Set(du, 0x8000)));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(du, 112u << 23));
    const auto subnormal = hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24f)));
    const auto special = hn::Or(shifted, hn::Set(du, 0x7f800000));
    const auto quiet = hn::Or(special, hn::Set(du, 0x00400000));
    auto bits = hn::IfThenElse(hn::Gt(hn::Set(du, 0x400), magnitude), subnormal, normal);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7bff)), special, bits);
    bits = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7c00)), quiet, bits);
    return hn::BitCast(d, hn::Or(sign, bits));
  }
  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, uint16_t* to, bool stream = false) {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, value);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(du, 0xfff)));
    const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))), hn::Set(du, 0x3f000000));
    auto half = hn::IfThenElse(hn::Gt(hn::Set(du, 0x38800000), magnitude), subnormal, normal);
    half = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477fefff)), hn::Set(du, 0x7c00), half);
    half = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), hn::Set(du, 0x7e00), half);
    StoreHalves(d, hn::Or(sign, half), to, stream);
  }
};

// One element of Adam in every lane; the formula of adam.h.
template <bool kL2, class D, class V = hn::Vec<D>>
HWY_INLINE void Update(D d, const AdamStep& step, V gradient, V& p, V& m, V& v) {
  V g = hn::Mul(gradient, hn::Set(d, step.gradient_scale));
  if (kL2 && step.l2 != 0) g = hn::MulAdd(hn::Set(d, step.l2), p, g);
  const V g2 = FlushBelow(d, 0x1p-62f, g);
  m = hn::MulAdd(hn::Set(d, step.beta1), m, hn::Mul(hn::Set(d, step.one_minus_beta1), g));
  v = hn::MulAdd(hn::Set(d, step.beta2), v, hn::Mul(hn::Set(d, step.one_minus_beta2), hn::Mul(g2, g2)));
  m = FlushBelow(d, 0x1p-100f, m);
  v = hn::IfThenZeroElse(hn::Lt(v, hn::Set(d, 0x1p-120f)), v);
  const V denominator = hn::MulAdd(hn::Sqrt(v), hn::Set(d, step.inv_sqrt_bias_correction2), hn::Set(d, step.eps));
  p = hn::MulAdd(hn::Set(d, -step.step_size), hn::Div(m, denominator), hn::Mul(p, hn::Set(d, step.decay)));
}

// What a pass does. undo: saves old state in the undo slot before it is overwritten.
struct Kind {
  bool absorb = false, publish = false, theta = false, undo = false;
  bool l2 = false;      // weight decay may be a term of the gradient
  bool padded = false;  // runs on a short copy, beyond which nothing may be prefetched
};

// What a pass over a run of elements reads and writes; null where it does not. Passed by value: what is local to the
// loop cannot alias what the loop stores, and stays in registers.
template <class G, class T>
struct Pass {
  AdamState state;
  AdamStep absorb;
  const typename G::Element* pending;
  AdamStep publish;
  const typename G::Element* gradient;
  typename T::Element* theta;
  UndoSlot* undo;
  size_t ahead = PrefetchElements();
};

// `i` is an element ahead of the loop.
template <class... Elements>
HWY_INLINE void PrefetchAt(size_t i, const Elements*... arrays) {
  (hwy::Prefetch(arrays + i), ...);
}

// Absorbs the pending gradient of one vector, at element `i`.
template <Kind kKind, class G, class T>
HWY_INLINE void AbsorbVector(const Pass<G, T>& pass, size_t i) {
  const FloatTag d;
  auto p = hn::LoadU(d, pass.state.p + i);
  auto m = hn::LoadU(d, pass.state.m + i);
  auto v = hn::LoadU(d, pass.state.v + i);
  if constexpr (kKind.undo) {
    const size_t slot = i % kUndoElements;
    hn::StoreU(p, d, pass.undo->p + slot);
    hn::StoreU(m, d, pass.undo->m + slot);
    hn::StoreU(v, d, pass.undo->v + slot);
    KeepOrder();
    pass.undo->torn = TornGranule(i, hn::Lanes(d));
    KeepOrder();
  }
  Update<kKind.l2>(d, pass.absorb, G::Load(d, pass.pending + i), p, m, v);
  hn::StoreU(p, d, pass.state.p + i);
  hn::StoreU(m, d, pass.state.m + i);
  hn::StoreU(v, d, pass.state.v + i);
}

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

// Adds the squares of a vector of gradients, the granule's from element `first` on, to the lanes of their indices
// modulo
// 8. How many vectors the lanes take depends on the instruction set.
template <class V>
HWY_INLINE void AddSquares(hn::Vec<FloatTag> gradient, size_t first, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  const DoubleTag dd;
  const size_t n = hn::Lanes(dd);
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

template <class V>
HWY_INLINE double SumLanes(V lanes0, V lanes1, V lanes2, V lanes3) {
  const DoubleTag dd;
  const size_t n = hn::Lanes(dd);
  HWY_ALIGN double lanes[4 * kNormLanes];
  hn::StoreU(lanes0, dd, lanes);
  hn::StoreU(lanes1, dd, lanes + n);
  hn::StoreU(lanes2, dd, lanes + 2 * n);
  hn::StoreU(lanes3, dd, lanes + 3 * n);
  double sum = 0;
  for (size_t i = 0; i < kNormLanes; ++i) sum += lanes[i];
  return sum;
}

// Elements that one turn of the loops covers.
HWY_INLINE size_t Granule() { return HWY_MAX(hn::Lanes(FloatTag()), kNormLanes); }

// One block of a pass, elements [first, first + n): whole granules, at most kBlockElements. Stage by stage, each of
// which keeps many independent vectors in flight; all in one, a vector waits for two square roots and two divisions
// with so many instructions behind it that the core's window holds only a few vectors.
template <Kind kKind, class G, class T, class V>
HWY_INLINE void RunBlock(const Pass<G, T>& pass, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  const FloatTag d;
  const size_t vector = hn::Lanes(d), granule = Granule();
  if constexpr (kKind.absorb) {
    for (size_t i = first; i < first + n; i += vector) {
      if constexpr (!kKind.padded) PrefetchAt(i + pass.ahead, pass.state.p, pass.pending);
      if constexpr (!kKind.padded && !kKind.publish) PrefetchAt(i + pass.ahead, pass.state.m, pass.state.v);
      AbsorbVector<kKind>(pass, i);
    }
  }
  HWY_ALIGN float published[kBlockElements];
  if constexpr (kKind.publish) {
    for (size_t i = 0; i < n; i += granule) {
      for (size_t j = i; j < i + granule; j += vector) {
        if constexpr (!kKind.padded) PrefetchAt(first + j + pass.ahead, pass.gradient, pass.state.m, pass.state.v);
        if constexpr (!kKind.padded && !kKind.absorb) PrefetchAt(first + j + pass.ahead, pass.state.p);
        const auto gradient = G::Load(d, pass.gradient + first + j);
        auto p = hn::LoadU(d, pass.state.p + first + j);
        auto m = hn::LoadU(d, pass.state.m + first + j);
        auto v = hn::LoadU(d, pass.state.v + first + j);
        Update<kKind.l2>(d, pass.publish, gradient, p, m, v);
        hn::Store(p, d, published + j);
        AddSquares(gradient, j - i, lanes0, lanes1, lanes2, lanes3);
      }
    }
  }
  if constexpr (kKind.theta) {
    const float* const from = kKind.publish ? published : pass.state.p + first;
    const bool stream = !kKind.padded && reinterpret_cast<uintptr_t>(pass.theta) % kStreamAlignment == 0;
    for (size_t i = 0; i < n; i += vector) T::Store(d, hn::LoadU(d, from + i), pass.theta + first + i, stream);
  }
}

// The last `n` elements, fewer than a granule, through zero-padded copies.
template <Kind kKind, class G, class T, class V>
HWY_INLINE void RunTail(const Pass<G, T>& pass, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  HWY_ALIGN float p[kMaxLanes] = {}, m[kMaxLanes] = {}, v[kMaxLanes] = {};
  HWY_ALIGN typename G::Element pending[kMaxLanes] = {}, gradient[kMaxLanes] = {};
  HWY_ALIGN typename T::Element theta[kMaxLanes] = {};
  std::memcpy(p, pass.state.p + first, n * sizeof(float));
  std::memcpy(m, pass.state.m + first, n * sizeof(float));
  std::memcpy(v, pass.state.v + first, n * sizeof(float));
  if constexpr (kKind.absorb) std::memcpy(pending, pass.pending + first, n * sizeof(*pending));
  if constexpr (kKind.publish) std::memcpy(gradient, pass.gradient + first, n * sizeof(*gradient));
  if constexpr (kKind.undo) {
    const size_t slot = first % kUndoElements;
    std::memcpy(pass.undo->p + slot, p, n * sizeof(float));
    std::memcpy(pass.undo->m + slot, m, n * sizeof(float));
    std::memcpy(pass.undo->v + slot, v, n * sizeof(float));
    KeepOrder();
    pass.undo->torn = TornGranule(first, n);
    KeepOrder();
  }
  constexpr Kind kPadded{kKind.absorb, kKind.publish, kKind.theta, /*undo=*/false, kKind.l2, /*padded=*/true};
  const Pass<G, T> padded{{p, m, v}, pass.absorb, pending, pass.publish, gradient, theta, nullptr};
  RunBlock<kPadded>(padded, 0, Granule(), lanes0, lanes1, lanes2, lanes3);
  if constexpr (kKind.absorb) {
    std::memcpy(pass.state.p + first, p, n * sizeof(float));
    std::memcpy(pass.state.m + first, m, n * sizeof(float));
    std::memcpy(pass.state.v + first, v, n * sizeof(float));
  }
  if constexpr (kKind.theta) std::memcpy(pass.theta + first, theta, n * sizeof(*theta));
}

// The driver of every pass over state.
template <Kind kKind, class G, class T>
double RunBlocks(size_t n, const Pass<G, T> pass, size_t first) {
  const DoubleTag dd;
  auto lanes0 = hn::Zero(dd), lanes1 = hn::Zero(dd), lanes2 = hn::Zero(dd), lanes3 = hn::Zero(dd);
  const size_t whole = first + (n - first) / Granule() * Granule();
  for (size_t i = first; i < whole; i += kBlockElements) {
    RunBlock<kKind>(pass, i, HWY_MIN(kBlockElements, whole - i), lanes0, lanes1, lanes2, lanes3);
  }
  if (whole < n) RunTail<kKind>(pass, whole, n - whole, lanes0, lanes1, lanes2, lanes3);
  hwy::FlushStream();  // before anybody is told that theta is there
  return SumLanes(lanes0, lanes1, lanes2, lanes3);
}

// Returns the sum of squares of the published gradient, 0 without one.
template <Kind kKind, class G, class T>
double Run(size_t n, const Pass<G, T>& pass, size_t first = 0) {
  constexpr Kind kWithL2{kKind.absorb, kKind.publish, kKind.theta, kKind.undo, /*l2=*/true};
  const bool l2 = pass.absorb.l2 != 0 || pass.publish.l2 != 0;
  return l2 ? RunBlocks<kWithL2>(n, pass, first) : RunBlocks<kKind>(n, pass, first);
}

// Calls `visit` with the codec of a run-time dtype.
template <class Visit>
HWY_INLINE auto WithCodec(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(BFloat16());
    case DType::kFloat16:
      return visit(Float16());
    case DType::kFloat32:
      break;
  }
  return visit(Float32());
}

template <class G>
HWY_INLINE const typename G::Element* As(ConstElements elements) {
  return static_cast<const typename G::Element*>(elements.data);
}
template <class T>
HWY_INLINE typename T::Element* As(MutableElements elements) {
  return static_cast<typename T::Element*>(elements.data);
}

constexpr Kind kDeferred{.absorb = true, .publish = true, .theta = true};
constexpr Kind kDeferredUndo{.absorb = true, .publish = true, .theta = true, .undo = true};
constexpr Kind kRepublish{.publish = true, .theta = true};
constexpr Kind kSettle{.absorb = true};
constexpr Kind kSettleUndo{.absorb = true, .undo = true};
constexpr Kind kPlain{.absorb = true, .theta = true};

double VectorDeferred(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, const AdamStep& publish,
                      ConstElements gradient, MutableElements theta, UndoSlot* undo) {
  return WithCodec(gradient.dtype, [&](auto g) {
    return WithCodec(theta.dtype, [&](auto t) {
      using G = decltype(g);
      using T = decltype(t);
      const Pass<G, T> pass{state, absorb, As<G>(pending), publish, As<G>(gradient), As<T>(theta), undo};
      return undo == nullptr ? Run<kDeferred>(n, pass) : Run<kDeferredUndo>(n, pass);
    });
  });
}

double VectorRepublish(size_t n, AdamState state, const AdamStep& publish, ConstElements gradient,
                       MutableElements theta) {
  return WithCodec(gradient.dtype, [&](auto g) {
    return WithCodec(theta.dtype, [&](auto t) {
      using G = decltype(g);
      using T = decltype(t);
      return Run<kRepublish>(n, Pass<G, T>{state, {}, nullptr, publish, As<G>(gradient), As<T>(theta), nullptr});
    });
  });
}

void VectorSettle(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, UndoSlot* undo,
                  size_t first) {
  WithCodec(pending.dtype, [&](auto g) {
    using G = decltype(g);
    const Pass<G, Float32> pass{state, absorb, As<G>(pending), {}, nullptr, nullptr, undo};
    return undo == nullptr ? Run<kSettle>(n, pass, first) : Run<kSettleUndo>(n, pass, first);
  });
}

void VectorPlain(size_t n, AdamState state, const AdamStep& absorb, ConstElements pending, MutableElements theta) {
  WithCodec(pending.dtype, [&](auto g) {
    return WithCodec(theta.dtype, [&](auto t) {
      using G = decltype(g);
      using T = decltype(t);
      return Run<kPlain>(n, Pass<G, T>{state, absorb, As<G>(pending), {}, nullptr, As<T>(theta), nullptr});
    });
  });
}

// Converts a run between two dtypes, one of which is fp32.
template <class From, class To>
HWY_INLINE void Convert(size_t n, const typename From::Element* from, typename To::Element* to) {
  const FloatTag d;
  const size_t vector = hn::Lanes(d);
  size_t i = 0;
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

double VectorSumOfSquares(size_t n, ConstElements gradient) {
  return WithCodec(gradient.dtype, [&](auto g) {
    using G = decltype(g);
    const typename G::Element* from = As<G>(gradient);
    const FloatTag d;
    const DoubleTag dd;
    auto lanes0 = hn::Zero(dd), lanes1 = hn::Zero(dd), lanes2 = hn::Zero(dd), lanes3 = hn::Zero(dd);
    const size_t granule = Granule(), ahead = PrefetchElements();
    size_t i = 0;
    for (; i + granule <= n; i += granule) {
      PrefetchAt(i + ahead, from);
      for (size_t j = 0; j < granule; j += hn::Lanes(d)) {
        AddSquares(G::Load(d, from + i + j), j, lanes0, lanes1, lanes2, lanes3);
      }
    }
    if (i < n) {
      HWY_ALIGN typename G::Element padded[kMaxLanes] = {};
      std::memcpy(padded, from + i, (n - i) * sizeof(*padded));
      for (size_t j = 0; j < n - i; j += hn::Lanes(d)) {
        AddSquares(G::Load(d, padded + j), j, lanes0, lanes1, lanes2, lanes3);
      }
    }
    return SumLanes(lanes0, lanes1, lanes2, lanes3);
  });
}

}  // namespace

extern const AdamKernels SUPEROFFLOAD_KERNELS;
const AdamKernels SUPEROFFLOAD_KERNELS{SUPEROFFLOAD_TARGET, VectorDeferred, VectorRepublish, VectorSettle,
                                       VectorPlain,         VectorNarrow,   VectorWiden,     VectorSumOfSquares};

}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();
