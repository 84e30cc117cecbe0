// The passes of algorithm.h over one chunk, for any algorithm that updates element by element: one source, compiled
// once per instruction set. An algorithm gives its formula, a struct with
//
//   using Step                 its constants, as StepConstants holds them; `step` among them is the step count of the
//                              parameter, where state is rounded stochastically
//   using State                its arrays, a StoredArrays
//   static void Update(d, step, gradient, p, ...)    one vector of every array, in place
//   static bool Fits(step)     whether it does what these constants ask for; if not,
//   using Full                 does
//
// Usual pairs of dtypes of gradients and parameters have loops of their own. Others are converted block by block, which
// takes a few percent longer and saves most of the code.
//
// The loop runs over granules of 8 elements, or of one vector where that is longer, because the norm's eight lanes are
// element indices modulo 8. What is left at the end goes through zero-padded buffers and the same code, so that nothing
// beyond the spans is touched; zeros add nothing to the norm.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_

#include <cstring>
#include <utility>

#include "kernels/algorithm.h"
#include "kernels/undo_slot.h"
#include "kernels/vector/norm-inl.h"
#include "kernels/vector/philox-inl.h"
#include "kernels/vector/stored-inl.h"

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

// What a pass over a range of elements reads and writes; null where it does not. Passed by value: what is local to the
// loop cannot alias what the loop stores, and stays in registers.
template <class F, class G, class T>
struct Pass {
  typename F::State::Pointers state;
  typename F::Step absorb;
  GradientIn<G> pending;
  typename F::Step publish;
  GradientIn<G> gradient;
  ThetaOut<T> theta;
  Rounding rounding;
  UndoSlot* undo;
  size_t ahead = PrefetchElements();
};

// Calls body(p, ...) with one vector of each array at element `i`. Vectors of SVE cannot be elements of an array.
template <class State, class Body>
HWY_INLINE void WithState(const typename State::Pointers& state, size_t i, Body body) {
  static_assert(State::kCount >= 2 && State::kCount <= 3, "add the vectors of one more array here");
  const FloatTag d;
  auto p = State::template At<0>::Load(d, state.template at<0>() + i);
  auto m = State::template At<1>::Load(d, state.template at<1>() + i);
  if constexpr (State::kCount == 2) {
    body(p, m);
  } else {
    auto v = State::template At<2>::Load(d, state.template at<2>() + i);
    body(p, m, v);
  }
}

// Asks for every array but the master weights.
template <class State>
HWY_INLINE void PrefetchMoments(const typename State::Pointers& state, size_t i) {
  std::apply([i](auto*, auto*... moments) { PrefetchAt(i, moments...); }, state.arrays);
}

// Vectors of every array, at element `i`: into the undo slot as they were loaded, and into memory as they are now.
template <class State, size_t... kArrays, class... V>
HWY_INLINE void KeepState(std::index_sequence<kArrays...>, UndoSlot& undo, size_t i, V... values) {
  (State::template At<kArrays>::Keep(FloatTag(), values,
                                     undo.Old<typename State::template At<kArrays>::Entry>(kArrays, i)),
   ...);
}
template <class State, size_t... kArrays, class... V>
HWY_INLINE void StoreState(std::index_sequence<kArrays...>, const typename State::Pointers& state, size_t i,
                           const uint32_t* words, V... values) {
  (State::template At<kArrays>::Store(FloatTag(), values, state.template at<kArrays>() + i, words), ...);
}

// Absorbs the pending gradient of one vector, at element `i`. `words`: of its elements, where state is rounded.
template <Kind kKind, class F, class G, class T>
HWY_INLINE void AbsorbVector(const Pass<F, G, T>& pass, size_t i, hn::Vec<FloatTag> pending, const uint32_t* words) {
  using State = typename F::State;
  constexpr auto kArrays = std::make_index_sequence<State::kCount>();
  const FloatTag d;
  WithState<State>(pass.state, i, [&](auto&... state) {
    if constexpr (!kKind.padded) {
      KeepState<State>(kArrays, *pass.undo, i, state...);
      KeepOrder();
      pass.undo->torn = TornGranule(i, hn::Lanes(d));
      KeepOrder();
    }
    F::Update(d, pass.absorb, pending, state...);
    StoreState<State>(kArrays, pass.state, i, words, state...);
  });
}

// One block of a pass, elements [first, first + n): whole granules, at most kBlockElements. Stage by stage, each of
// which keeps many independent vectors in flight; all in one, a vector waits for two square roots and two divisions
// with so many instructions behind it that the core's window holds only a few vectors.
template <Kind kKind, class F, class G, class T, class V>
HWY_INLINE void RunBlock(const Pass<F, G, T>& pass, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2,
                         V& lanes3) {
  using State = typename F::State;
  const FloatTag d;
  const size_t vector = hn::Lanes(d), granule = Granule();
  HWY_ALIGN float buffer[kBlockElements];
  if constexpr (kKind.absorb) {
    HWY_ALIGN uint32_t words[State::kRounds ? kBlockElements : 1];
    if constexpr (State::kRounds) {
      RoundingWords(pass.rounding, pass.absorb.step, RoundingPair(1), first, n, words);
    }
    const auto* const pending = pass.pending.Open(first, n, buffer);
    for (size_t i = 0; i < n; i += vector) {
      if constexpr (!kKind.padded) PrefetchAt(first + i + pass.ahead, pass.state.template at<0>());
      if constexpr (!kKind.padded) pass.pending.Prefetch(first + i + pass.ahead);
      if constexpr (!kKind.padded && !kKind.publish) PrefetchMoments<State>(pass.state, first + i + pass.ahead);
      AbsorbVector<kKind>(pass, first + i, pass.pending.Load(pending + i), State::kRounds ? words + i : nullptr);
    }
  }
  HWY_ALIGN float published[kBlockElements];
  if constexpr (kKind.publish) {
    const auto* const opened = pass.gradient.Open(first, n, buffer);
    for (size_t i = 0; i < n; i += granule) {
      for (size_t j = i; j < i + granule; j += vector) {
        if constexpr (!kKind.padded) pass.gradient.Prefetch(first + j + pass.ahead);
        if constexpr (!kKind.padded) PrefetchMoments<State>(pass.state, first + j + pass.ahead);
        if constexpr (!kKind.padded && !kKind.absorb) {
          PrefetchAt(first + j + pass.ahead, pass.state.template at<0>());
        }
        const auto gradient = pass.gradient.Load(opened + j);
        WithState<State>(pass.state, first + j, [&](auto& p, auto&... moments) {
          F::Update(d, pass.publish, gradient, p, moments...);
          hn::Store(p, d, published + j);
        });
        if constexpr (kKind.norm) AddSquaresOf(gradient, j - i, lanes0, lanes1, lanes2, lanes3);
      }
    }
  }
  if constexpr (kKind.theta) {
    pass.theta.Store(kKind.publish ? published : pass.state.template at<0>() + first, first, n, !kKind.padded);
  }
}

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

// The same for a loop: typed.
template <class F, class G, class T>
HWY_INLINE Pass<F, G, T> PassOf(const Call& call) {
  using Step = typename F::Step;
  return {F::State::PointersTo(call.state.arrays),
          call.absorb.As<Step>(),
          GradientIn<G>(call.pending),
          call.publish.As<Step>(),
          GradientIn<G>(call.gradient),
          ThetaOut<T>(call.theta),
          call.state.rounding,
          call.undo};
}

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

// The last `n` elements, fewer than a granule, through zero-padded copies.
template <Kind kKind, class F, class G, class T, class V>
HWY_INLINE void RunTail(const Call& call, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
  using State = typename F::State;
  PaddedEntries arrays[State::kCount], pending, gradient, theta;
  StateView state = call.state;
  state.rounding.first += first;
  for (size_t a = 0; a < State::kCount; ++a) {
    state.arrays[a] = arrays[a].From(call.state.arrays[a], first, n, State::kDTypes[a]);
    if constexpr (kKind.absorb) {
      std::memcpy(call.undo->OldBytes(a, kUndoElements) + first % kUndoElements * DTypeBytes(State::kDTypes[a]),
                  arrays[a].bytes, n * DTypeBytes(State::kDTypes[a]));
    }
  }
  if constexpr (kKind.absorb) {
    KeepOrder();
    call.undo->torn = TornGranule(first, n);
    KeepOrder();
  }
  Call padded{0, Granule(), state, call.absorb, {}, call.publish, {}, {theta.bytes, call.theta.dtype}};
  if constexpr (kKind.absorb) {
    padded.pending = {pending.From(call.pending.data, first, n, call.pending.dtype), call.pending.dtype};
  }
  if constexpr (kKind.publish) {
    padded.gradient = {gradient.From(call.gradient.data, first, n, call.gradient.dtype), call.gradient.dtype};
  }
  constexpr Kind kPadded{kKind.absorb, kKind.publish, kKind.norm, kKind.theta, /*padded=*/true};
  RunBlock<kPadded>(PassOf<F, G, T>(padded), 0, Granule(), lanes0, lanes1, lanes2, lanes3);
  if constexpr (kKind.absorb) {
    for (size_t a = 0; a < State::kCount; ++a) arrays[a].To(call.state.arrays[a], first, n, State::kDTypes[a]);
  }
  if constexpr (kKind.theta) theta.To(call.theta.data, first, n, call.theta.dtype);
}

// The loop of every pass.
template <Kind kKind, class F, class G, class T>
void Run(const Call& call) {
  const DoubleTag dd;
  const Pass<F, G, T> pass = PassOf<F, G, T>(call);
  auto lanes0 = hn::Zero(dd), lanes1 = hn::Zero(dd), lanes2 = hn::Zero(dd), lanes3 = hn::Zero(dd);
  if constexpr (kKind.norm) LoadLanes(*call.norm, lanes0, lanes1, lanes2, lanes3);
  const size_t whole = call.first + (call.n - call.first) / Granule() * Granule();
  for (size_t i = call.first; i < whole; i += kBlockElements) {
    RunBlock<kKind>(pass, i, HWY_MIN(kBlockElements, whole - i), lanes0, lanes1, lanes2, lanes3);
  }
  if (whole < call.n) RunTail<kKind, F, G, T>(call, whole, call.n - whole, lanes0, lanes1, lanes2, lanes3);
  hwy::FlushStream();  // before anybody is told that theta is there
  if constexpr (kKind.norm) StoreLanes(lanes0, lanes1, lanes2, lanes3, *call.norm);
}

// With loops of their own: bf16 and fp32, and fp32 gradients of bf16 parameters, as the GPU casts them.
template <Kind kKind, class F>
void RunInDTypes(const Call& call) {
  const DType gradient = kKind.publish ? call.gradient.dtype : call.pending.dtype;
  const DType theta = kKind.theta ? call.theta.dtype : gradient;
  if (F::Fits(call.absorb.As<typename F::Step>()) && F::Fits(call.publish.As<typename F::Step>())) {
    if (gradient == DType::kBFloat16 && theta == DType::kBFloat16) return Run<kKind, F, BFloat16, BFloat16>(call);
    if (gradient == DType::kFloat32 && theta == DType::kFloat32) return Run<kKind, F, Float32, Float32>(call);
    if constexpr (kKind.theta) {
      if (gradient == DType::kFloat32 && theta == DType::kBFloat16) return Run<kKind, F, Float32, BFloat16>(call);
    }
  }
  Run<kKind, typename F::Full, AnyDType, AnyDType>(call);
}

// The passes of formula F as algorithm.h declares them.
template <class F>
struct Passes {
  // What is to be undone by nobody is saved all the same: it costs next to nothing, and one loop is enough.
  template <Kind kKind>
  static void RunWithUndo(Call& call) {
    struct {
      UndoSlot slot;
      std::byte old[F::State::kCount * kUndoElements * sizeof(float)];
    } own;
    if (call.undo == nullptr) call.undo = &own.slot;
    RunInDTypes<kKind, F>(call);
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    Call call{first, n, state, absorb, pending};
    call.undo = undo;
    RunWithUndo<Kind{.absorb = true}>(call);
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    const Call call{first, n, state, {}, {}, publish, gradient, theta, norm};
    norm == nullptr ? RunInDTypes<Kind{.publish = true, .theta = true}, F>(call)
                    : RunInDTypes<Kind{.publish = true, .norm = true, .theta = true}, F>(call);
  }

  static void AbsorbAndPublish(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                               ConstElements pending, const StepConstants& publish, ConstElements gradient,
                               MutableElements theta, NormLanes* norm, UndoSlot* undo) {
    Call call{first, n, state, absorb, pending, publish, gradient, theta, norm, undo};
    norm == nullptr ? RunWithUndo<Kind{.absorb = true, .publish = true, .theta = true}>(call)
                    : RunWithUndo<Kind{.absorb = true, .publish = true, .norm = true, .theta = true}>(call);
  }

  static void Plain(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                    MutableElements theta) {
    Call call{first, n, state, absorb, pending};
    call.theta = theta;
    RunWithUndo<Kind{.absorb = true, .theta = true}>(call);
  }

  static constexpr AlgorithmKernels Table(const char* target) {
    return {target, Absorb, Publish, AbsorbAndPublish, Plain};
  }
};

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_PASS_INL_H_
