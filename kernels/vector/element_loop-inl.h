// The loop of passes that update element by element, for the sources that are compiled once per instruction set.
//
// It runs over granules of 8 elements, or of one vector where that is longer, because the norm's eight lanes are
// element indices modulo 8. What is left at the end goes through zero-padded buffers and the same code, so that nothing
// beyond the spans is touched; zeros add nothing to the norm.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_ELEMENT_LOOP_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_ELEMENT_LOOP_INL_H_

#include <cstring>
#include <tuple>
#include <utility>

#include "kernels/vector/call-inl.h"
#include "kernels/vector/stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

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
                           const uint32_t* of_masters, const uint32_t* of_moments, V... values) {
  (State::template At<kArrays>::Store(FloatTag(), values, state.template at<kArrays>() + i,
                                      kArrays == 0 ? of_masters : of_moments),
   ...);
}

// Absorbs the pending gradient of one vector, at element `i`, with the words of its elements.
template <Kind kKind, class F, class G, class T>
HWY_INLINE void AbsorbVector(const Pass<F, G, T>& pass, size_t i, hn::Vec<FloatTag> pending, const uint32_t* of_masters,
                             const uint32_t* of_moments) {
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
    StoreState<State>(kArrays, pass.state, i, of_masters, of_moments, state...);
  });
}

// One block of a pass, elements [first, first + n): whole granules, at most kBlockElements. Stage by stage, each of
// which keeps many independent vectors in flight; all in one, a vector waits for two square roots and two divisions
// with so many instructions behind it that the core's window holds only a few vectors.
template <Kind kKind, class F, class G, class T, class V>
HWY_INLINE void RunBlock(const Pass<F, G, T>& pass, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2,
                         V& lanes3) {
  using State = typename F::State;
  using Master = typename State::template At<0>;
  const FloatTag d;
  const size_t vector = hn::Lanes(d), granule = Granule();
  HWY_ALIGN float buffer[kBlockElements];
  BlockWords<State::kRoundsMasters, 0> of_masters;
  if constexpr (kKind.absorb) {
    BlockWords<State::kRoundsMoments, 1> of_moments;
    of_moments.Draw(pass.rounding, pass.absorb, first, n);
    of_masters.Draw(pass.rounding, pass.absorb, first, n);
    const auto* const pending = pass.pending.Open(first, n, buffer);
    for (size_t i = 0; i < n; i += vector) {
      if constexpr (!kKind.padded) PrefetchAt(first + i + pass.ahead, pass.state.template at<0>());
      if constexpr (!kKind.padded) pass.pending.Prefetch(first + i + pass.ahead);
      if constexpr (!kKind.padded && !kKind.publish) PrefetchMoments<State>(pass.state, first + i + pass.ahead);
      AbsorbVector<kKind>(pass, first + i, pass.pending.Load(pending + i), of_masters.at(i), of_moments.at(i));
    }
  }
  HWY_ALIGN float published[kBlockElements];
  if constexpr (kKind.publish) {
    const auto* const opened = pass.gradient.Open(first, n, buffer);
    of_masters.Draw(pass.rounding, pass.publish, first, n);
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
          hn::Store(Master::Rounded(d, p, of_masters.at(j)), d, published + j);
        });
        if constexpr (kKind.norm) AddSquaresOf(gradient, j - i, lanes0, lanes1, lanes2, lanes3);
      }
    }
  }
  if constexpr (kKind.theta) {
    const float* masters = published;
    if constexpr (!kKind.publish) masters = MastersOf<Master>(pass.state.template at<0>() + first, n, published);
    pass.theta.Store(masters, first, n, !kKind.padded);
  }
}

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

// The loop of every pass of formula F, whose State is a StoredArrays.
template <class F>
struct ElementLoop {
  using Formula = F;
  using Full = ElementLoop<typename F::Full>;
  static constexpr size_t kUndoBytes = F::State::kCount * kUndoElements * sizeof(float);

  template <Kind kKind, class G, class T>
  static void Run(const Call& call);
};

template <class F>
template <Kind kKind, class G, class T>
void ElementLoop<F>::Run(const Call& call) {
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

template <class... Arrays>
struct StoredState : StoredArrays<Arrays...> {
  template <class F>
  using LoopOf = ElementLoop<F>;
};

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_ELEMENT_LOOP_INL_H_
