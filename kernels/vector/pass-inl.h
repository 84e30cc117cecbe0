// The passes of algorithm.h over one chunk, for any algorithm whose state arrays are fp32: one source, compiled once
// per instruction set. An algorithm gives its formula, a struct with
//
//   using Step                          its constants, as StepConstants holds them
//   static constexpr size_t kArrays     of its state
//   static void Update(d, step, gradient, p, ...)    one vector of every array, in place
//   static void Visit(absorb, publish, body)         calls body(formula) with the variant that the constants ask for
//
// The loop runs over granules of 8 elements, or of one vector where that is longer, because the norm's eight lanes are
// element indices modulo 8. What is left at the end goes through zero-padded buffers and the same code, so that nothing
// beyond the spans is touched; zeros add nothing to the norm.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_

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

// What a pass does. norm: adds up the squares of what it publishes. undo: saves old state in the undo slot before it is
// overwritten.
struct Kind {
  bool absorb = false, publish = false, norm = false, theta = false, undo = false;
  bool padded = false;  // runs on a short copy, beyond which nothing may be prefetched
};

// What a pass over a range of elements reads and writes; null where it does not. Passed by value: what is local to the
// loop cannot alias what the loop stores, and stays in registers.
template <class F, class G, class T>
struct Pass {
  float* state[F::kArrays];
  typename F::Step absorb;
  const typename G::Element* pending;
  typename F::Step publish;
  const typename G::Element* gradient;
  typename T::Element* theta;
  UndoSlot* undo;
  size_t ahead = PrefetchElements();
};

// Calls body(p, ...) with one vector of each array at element `i`. Vectors of SVE cannot be elements of an array.
template <class F, class Body>
HWY_INLINE void WithState(float* const (&state)[F::kArrays], size_t i, Body body) {
  static_assert(F::kArrays >= 2 && F::kArrays <= 3, "add the vectors of one more array here");
  const FloatTag d;
  auto p = hn::LoadU(d, state[0] + i);
  auto m = hn::LoadU(d, state[1] + i);
  if constexpr (F::kArrays == 2) {
    body(p, m);
  } else {
    auto v = hn::LoadU(d, state[2] + i);
    body(p, m, v);
  }
}

// Asks for every array but the master weights.
template <class F>
HWY_INLINE void PrefetchMoments(float* const (&state)[F::kArrays], size_t i) {
  for (size_t array = 1; array < F::kArrays; ++array) PrefetchAt(i, state[array]);
}

// Absorbs the pending gradient of one vector, at element `i`.
template <Kind kKind, class F, class G, class T>
HWY_INLINE void AbsorbVector(const Pass<F, G, T>& pass, size_t i) {
  const FloatTag d;
  WithState<F>(pass.state, i, [&](auto&... state) {
    if constexpr (kKind.undo) {
      size_t array = 0;
      (hn::StoreU(state, d, pass.undo->template Old<float>(array++, i)), ...);
      KeepOrder();
      pass.undo->torn = TornGranule(i, hn::Lanes(d));
      KeepOrder();
    }
    F::Update(d, pass.absorb, G::Load(d, pass.pending + i), state...);
    size_t array = 0;
    (hn::StoreU(state, d, pass.state[array++] + i), ...);
  });
}

// One block of a pass, elements [first, first + n): whole granules, at most kBlockElements. Stage by stage, each of
// which keeps many independent vectors in flight; all in one, a vector waits for two square roots and two divisions
// with so many instructions behind it that the core's window holds only a few vectors.
template <Kind kKind, class F, class G, class T, class V>
HWY_INLINE void RunBlock(const Pass<F, G, T>& pass, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2,
                         V& lanes3) {
  const FloatTag d;
  const size_t vector = hn::Lanes(d), granule = Granule();
  if constexpr (kKind.absorb) {
    for (size_t i = first; i < first + n; i += vector) {
      if constexpr (!kKind.padded) PrefetchAt(i + pass.ahead, pass.state[0], pass.pending);
      if constexpr (!kKind.padded && !kKind.publish) PrefetchMoments<F>(pass.state, i + pass.ahead);
      AbsorbVector<kKind>(pass, i);
    }
  }
  HWY_ALIGN float published[kBlockElements];
  if constexpr (kKind.publish) {
    for (size_t i = 0; i < n; i += granule) {
      for (size_t j = i; j < i + granule; j += vector) {
        if constexpr (!kKind.padded) PrefetchAt(first + j + pass.ahead, pass.gradient);
        if constexpr (!kKind.padded) PrefetchMoments<F>(pass.state, first + j + pass.ahead);
        if constexpr (!kKind.padded && !kKind.absorb) PrefetchAt(first + j + pass.ahead, pass.state[0]);
        const auto gradient = G::Load(d, pass.gradient + first + j);
        WithState<F>(pass.state, first + j, [&](auto& p, auto&... moments) {
          F::Update(d, pass.publish, gradient, p, moments...);
          hn::Store(p, d, published + j);
        });
        if constexpr (kKind.norm) AddSquaresOf(gradient, j - i, lanes0, lanes1, lanes2, lanes3);
      }
    }
  }
  if constexpr (kKind.theta) {
    const float* const from = kKind.publish ? published : pass.state[0] + first;
    const bool stream = !kKind.padded && reinterpret_cast<uintptr_t>(pass.theta) % kStreamAlignment == 0;
    size_t i = 0;
    for (; i + 2 * vector <= n; i += 2 * vector) {
      T::StorePair(d, hn::LoadU(d, from + i), hn::LoadU(d, from + i + vector), pass.theta + first + i, stream);
    }
    if (i < n) T::Store(d, hn::LoadU(d, from + i), pass.theta + first + i, stream);
  }
}

// The last `n` elements, fewer than a granule, through zero-padded copies.
template <Kind kKind, class F, class G, class T, class V>
HWY_INLINE void RunTail(const Pass<F, G, T>& pass, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  HWY_ALIGN float state[F::kArrays][kMaxLanes] = {};
  HWY_ALIGN typename G::Element pending[kMaxLanes] = {}, gradient[kMaxLanes] = {};
  HWY_ALIGN typename T::Element theta[kMaxLanes] = {};
  for (size_t array = 0; array < F::kArrays; ++array) {
    std::memcpy(state[array], pass.state[array] + first, n * sizeof(float));
    if constexpr (kKind.undo) {
      std::memcpy(pass.undo->template Old<float>(array, first), state[array], n * sizeof(float));
    }
  }
  if constexpr (kKind.absorb) std::memcpy(pending, pass.pending + first, n * sizeof(*pending));
  if constexpr (kKind.publish) std::memcpy(gradient, pass.gradient + first, n * sizeof(*gradient));
  if constexpr (kKind.undo) {
    KeepOrder();
    pass.undo->torn = TornGranule(first, n);
    KeepOrder();
  }
  constexpr Kind kPadded{kKind.absorb, kKind.publish, kKind.norm, kKind.theta, /*undo=*/false, /*padded=*/true};
  Pass<F, G, T> padded{{}, pass.absorb, pending, pass.publish, gradient, theta, nullptr};
  for (size_t array = 0; array < F::kArrays; ++array) padded.state[array] = state[array];
  RunBlock<kPadded>(padded, 0, Granule(), lanes0, lanes1, lanes2, lanes3);
  if constexpr (kKind.absorb) {
    for (size_t array = 0; array < F::kArrays; ++array) {
      std::memcpy(pass.state[array] + first, state[array], n * sizeof(float));
    }
  }
  if constexpr (kKind.theta) std::memcpy(pass.theta + first, theta, n * sizeof(*theta));
}

// The driver of every pass, over elements [first, n).
template <Kind kKind, class F, class G, class T>
void RunBlocks(size_t first, size_t n, const Pass<F, G, T> pass, NormLanes* norm) {
  const DoubleTag dd;
  auto lanes0 = hn::Zero(dd), lanes1 = hn::Zero(dd), lanes2 = hn::Zero(dd), lanes3 = hn::Zero(dd);
  if constexpr (kKind.norm) LoadLanes(*norm, lanes0, lanes1, lanes2, lanes3);
  const size_t whole = first + (n - first) / Granule() * Granule();
  for (size_t i = first; i < whole; i += kBlockElements) {
    RunBlock<kKind>(pass, i, HWY_MIN(kBlockElements, whole - i), lanes0, lanes1, lanes2, lanes3);
  }
  if (whole < n) RunTail<kKind>(pass, whole, n - whole, lanes0, lanes1, lanes2, lanes3);
  hwy::FlushStream();  // before anybody is told that theta is there
  if constexpr (kKind.norm) StoreLanes(lanes0, lanes1, lanes2, lanes3, *norm);
}

// With the variant of formula F that the constants ask for.
template <Kind kKind, class F, class G, class T>
void Run(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
         const StepConstants& publish, ConstElements gradient, MutableElements theta, NormLanes* norm, UndoSlot* undo) {
  const auto absorb_step = absorb.As<typename F::Step>(), publish_step = publish.As<typename F::Step>();
  F::Visit(absorb_step, publish_step, [&](auto variant) {
    using Variant = decltype(variant);
    Pass<Variant, G, T> pass{{}, absorb_step, As<G>(pending), publish_step, As<G>(gradient), As<T>(theta), undo};
    for (size_t array = 0; array < F::kArrays; ++array) pass.state[array] = state.Floats(array);
    RunBlocks<kKind>(first, n, pass, norm);
  });
}

// The passes of formula F as algorithm.h declares them.
template <class F>
struct Passes {
  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    WithCodec(pending.dtype, [&](auto g) {
      constexpr Kind kAbsorb{.absorb = true}, kAbsorbUndo{.absorb = true, .undo = true};
      const auto run =
          undo == nullptr ? Run<kAbsorb, F, decltype(g), Float32> : Run<kAbsorbUndo, F, decltype(g), Float32>;
      run(first, n, state, absorb, pending, {}, {}, {}, nullptr, undo);
    });
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    WithCodec(gradient.dtype, [&](auto g) {
      WithCodec(theta.dtype, [&](auto t) {
        constexpr Kind kPublish{.publish = true, .theta = true}, kMeasure{.publish = true, .norm = true, .theta = true};
        const auto run =
            norm == nullptr ? Run<kPublish, F, decltype(g), decltype(t)> : Run<kMeasure, F, decltype(g), decltype(t)>;
        run(first, n, state, {}, {}, publish, gradient, theta, norm, nullptr);
      });
    });
  }

  static void AbsorbAndPublish(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                               ConstElements pending, const StepConstants& publish, ConstElements gradient,
                               MutableElements theta, NormLanes* norm, UndoSlot* undo) {
    WithCodec(gradient.dtype, [&](auto g) {
      WithCodec(theta.dtype, [&](auto t) {
        const bool undoes = undo != nullptr;
        const auto run = norm == nullptr ? Both<false, decltype(g), decltype(t)>(undoes)
                                         : Both<true, decltype(g), decltype(t)>(undoes);
        run(first, n, state, absorb, pending, publish, gradient, theta, norm, undo);
      });
    });
  }

  static void Plain(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                    MutableElements theta) {
    WithCodec(pending.dtype, [&](auto g) {
      WithCodec(theta.dtype, [&](auto t) {
        constexpr Kind kPlain{.absorb = true, .theta = true};
        Run<kPlain, F, decltype(g), decltype(t)>(first, n, state, absorb, pending, {}, {}, theta, nullptr, nullptr);
      });
    });
  }

  // absorb_and_publish, with or without norm and undo slot.
  template <bool kNorm, class G, class T>
  static auto Both(bool undo) {
    constexpr Kind kBoth{.absorb = true, .publish = true, .norm = kNorm, .theta = true};
    constexpr Kind kBothUndo{.absorb = true, .publish = true, .norm = kNorm, .theta = true, .undo = true};
    return undo ? Run<kBothUndo, F, G, T> : Run<kBoth, F, G, T>;
  }

  static constexpr AlgorithmKernels Table(const char* target) {
    return {target, Absorb, Publish, AbsorbAndPublish, Plain};
  }
};

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_
