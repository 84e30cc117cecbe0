// The loop of passes over moments that are stored as dynamic codes (codes/dynamic_code.h), for the sources that are
// compiled once per instruction set. A block of the codes is what the loop does at a time: it is decoded and updated in
// the first-level cache, where its scale is found, and encoded from there.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_BLOCK_LOOP_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_BLOCK_LOOP_INL_H_

#include <cstring>
#include <tuple>
#include <utility>

#include "kernels/vector/call-inl.h"
#include "kernels/vector/dynamic_code-inl.h"
#include "kernels/vector/stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

static_assert(kBlockElements % kCodeBlock == 0, "buffers hold a block of codes");

template <class F>
struct BlockLoop;

// A master weight, and for each moment its codes and their scales; whether they have signs.
template <class Masters, bool... kSigned>
struct CodedState {
  using Master = Masters;
  static constexpr size_t kMoments = sizeof...(kSigned);
  static constexpr bool kRoundsMasters = Master::kRounds;
  template <size_t kMoment>
  using Code = std::tuple_element_t<kMoment, std::tuple<VectorCode<kSigned>...>>;
  template <class F>
  using LoopOf = BlockLoop<F>;
};

// One block of state, whose masters are Entries.
template <class Entry, size_t kMoments>
struct CodedBlock {
  Entry* p;
  uint8_t* codes[kMoments];
  float* scales[kMoments];

  CodedBlock(const StateView& state, size_t first) : p(static_cast<Entry*>(state.arrays[0]) + first) {
    for (size_t moment = 0; moment < kMoments; ++moment) {
      codes[moment] = static_cast<uint8_t*>(state.arrays[1 + 2 * moment]) + first;
      scales[moment] = state.Floats(2 + 2 * moment) + first / kCodeBlock;
    }
  }
};

// The loop of every pass of formula F, whose State is a CodedState.
template <class F>
struct BlockLoop {
  using Formula = F;
  using Full = BlockLoop<typename F::Full>;
  using State = typename F::State;
  using Step = typename F::Step;
  using Master = typename State::Master;
  using Block = CodedBlock<typename Master::Entry, State::kMoments>;
  using Words = BlockWords<Master::kRounds, 0>;
  static constexpr size_t kMoments = State::kMoments, kArrays = 1 + 2 * kMoments;
  static constexpr size_t kKept = UndoElements(kCodeBlock);
  static constexpr size_t kUndoBytes = kArrays * kKept * sizeof(float);
  static_assert(kMoments == 1 || kMoments == 2, "add the vectors of one more moment to Update");

  // The next state of elements [j, j + lanes) of a block; body(p, moments...) gets it.
  template <class Body>
  static HWY_INLINE void Update(const Block& block, size_t j, const Step& step, hn::Vec<FloatTag> gradient, Body body) {
    const FloatTag d;
    auto p = Master::Load(d, block.p + j);
    auto m = State::template Code<0>::Decode(block.codes[0] + j, hn::Set(d, *block.scales[0]));
    if constexpr (kMoments == 1) {
      F::Update(d, step, gradient, p, m);
      body(p, m);
    } else {
      auto v = State::template Code<1>::Decode(block.codes[1] + j, hn::Set(d, *block.scales[1]));
      F::Update(d, step, gradient, p, m, v);
      body(p, m, v);
    }
  }

  // Old contents into the undo slot; element `first` of the range is the block's first.
  static HWY_INLINE void Save(const Block& block, size_t first, size_t n, UndoSlot& undo) {
    const auto keep = [&](size_t array, const void* from, size_t at, size_t bytes) {
      std::memcpy(undo.OldBytes(array, kKept) + at, from, bytes);
    };
    const size_t at = first % kKept;
    keep(0, block.p, at * sizeof(*block.p), n * sizeof(*block.p));
    for (size_t moment = 0; moment < kMoments; ++moment) {
      keep(1 + 2 * moment, block.codes[moment], at, n);
      keep(2 + 2 * moment, block.scales[moment], at / kCodeBlock * sizeof(float), sizeof(float));
    }
    KeepOrder();
    undo.torn = TornGranule(first, n);
    KeepOrder();
  }

  // Moment kMoment of a block, whose values are aligned.
  template <size_t kMoment>
  static HWY_INLINE void Encode(const Block& block, size_t n, const float* values, hn::Vec<FloatTag> largest,
                                hn::Vec<FloatTag> least) {
    using Code = typename State::template Code<kMoment>::Code;
    const FloatTag d;
    const float scale = Code::ScaleOf(hn::GetLane(hn::MaxOfLanes(d, largest)), hn::GetLane(hn::MinOfLanes(d, least)));
    const auto inverse = hn::Set(d, Code::InverseOf(scale));
    *block.scales[kMoment] = scale;
    for (size_t j = 0; j < n; j += hn::Lanes(d)) {
      State::template Code<kMoment>::Encode(hn::Load(d, values + j), inverse, block.codes[kMoment] + j);
    }
  }

  // A whole block, or a padded one. `undo`: null for a padded one, whose owner saves it. `rounding`: of the range.
  template <Kind kKind, class G, class T, class V>
  static HWY_INLINE void RunBlock(const Block& block, const Rounding& rounding, const Step& absorb,
                                  const GradientIn<G>& pending, const Step& publish, const GradientIn<G>& gradient,
                                  const ThetaOut<T>& theta, size_t first, size_t n, UndoSlot* undo, size_t ahead,
                                  V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
    const FloatTag d;
    const size_t vector = hn::Lanes(d), granule = Granule();
    HWY_ALIGN float buffer[kCodeBlock];
    HWY_ALIGN float published[kCodeBlock];
    Words words;
    if constexpr (kKind.absorb) {
      HWY_ALIGN float moments[kMoments][kCodeBlock];
      auto largest0 = hn::Zero(d), least0 = hn::Zero(d), largest1 = hn::Zero(d), least1 = hn::Zero(d);
      const auto* const opened = pending.Open(first, n, buffer);
      for (size_t j = 0; j < n; j += vector) {
        if constexpr (!kKind.padded) PrefetchAt(j + ahead, block.p, block.codes[0], block.codes[kMoments - 1]);
        if constexpr (!kKind.padded) pending.Prefetch(first + j + ahead);
        Update(block, j, absorb, pending.Load(opened + j), [&](auto p, auto m, auto... v) {
          hn::Store(p, d, published + j);
          hn::Store(m, d, moments[0] + j);
          largest0 = LargerOf(m, largest0);
          least0 = SmallerOf(m, least0);
          if constexpr (kMoments > 1) {
            (hn::Store(v, d, moments[kMoments - 1] + j), ...);
            ((largest1 = LargerOf(v, largest1)), ...);
            ((least1 = SmallerOf(v, least1)), ...);
          }
        });
      }
      words.Draw(rounding, absorb, first, n);
      if constexpr (!kKind.padded) Save(block, first, n, *undo);
      for (size_t j = 0; j < n; j += vector) Master::Store(d, hn::Load(d, published + j), block.p + j, words.at(j));
      Encode<0>(block, n, moments[0], largest0, least0);
      if constexpr (kMoments > 1) Encode<kMoments - 1>(block, n, moments[kMoments - 1], largest1, least1);
    }
    if constexpr (kKind.publish) {
      const auto* const opened = gradient.Open(first, n, buffer);
      words.Draw(rounding, publish, first, n);
      for (size_t i = 0; i < n; i += granule) {
        for (size_t j = i; j < i + granule; j += vector) {
          if constexpr (!kKind.padded) gradient.Prefetch(first + j + ahead);
          if constexpr (!kKind.padded && !kKind.absorb) {
            PrefetchAt(j + ahead, block.p, block.codes[0], block.codes[kMoments - 1]);
          }
          const auto g = gradient.Load(opened + j);
          Update(block, j, publish, g,
                 [&](auto p, auto...) { hn::Store(Master::Rounded(d, p, words.at(j)), d, published + j); });
          if constexpr (kKind.norm) AddSquaresOf(g, j - i, lanes0, lanes1, lanes2, lanes3);
        }
      }
    }
    if constexpr (kKind.theta) {
      const float* masters = published;
      if constexpr (!kKind.publish) masters = MastersOf<Master>(block.p, n, published);
      theta.Store(masters, first, n, !kKind.padded);
    }
  }

  // The last block of a parameter or a chunk, of `n` elements, through zero-padded copies.
  template <Kind kKind, class G, class T, class V>
  static HWY_INLINE void RunTail(const Call& call, size_t first, size_t n, V& lanes0, V& lanes1, V& lanes2, V& lanes3) {
    HWY_ALIGN typename Master::Entry p[kCodeBlock] = {};
    HWY_ALIGN uint8_t codes[kMoments][kCodeBlock] = {};
    HWY_ALIGN std::byte pending[kCodeBlock * sizeof(float)] = {};
    HWY_ALIGN std::byte gradient[kCodeBlock * sizeof(float)] = {};
    HWY_ALIGN std::byte theta[kCodeBlock * sizeof(float)] = {};
    float scales[kMoments];
    const Block block(call.state, first);
    Block padded = block;
    padded.p = p;
    std::memcpy(p, block.p, n * sizeof(*p));
    for (size_t moment = 0; moment < kMoments; ++moment) {
      padded.codes[moment] = codes[moment];
      padded.scales[moment] = &scales[moment];
      std::memcpy(codes[moment], block.codes[moment], n);
      scales[moment] = *block.scales[moment];
    }
    const auto take = [&](ConstElements from, std::byte* to) {
      const size_t bytes = DTypeBytes(from.dtype);
      std::memcpy(to, static_cast<const std::byte*>(from.data) + first * bytes, n * bytes);
    };
    if constexpr (kKind.absorb) take(call.pending, pending);
    if constexpr (kKind.publish) take(call.gradient, gradient);
    if constexpr (kKind.absorb) Save(block, first, n, *call.undo);
    constexpr Kind kPadded{kKind.absorb, kKind.publish, kKind.norm, kKind.theta, /*padded=*/true};
    const size_t granules = (n + Granule() - 1) / Granule() * Granule();
    Rounding rounding = call.state.rounding;
    rounding.first += first;
    RunBlock<kPadded, G, T>(padded, rounding, call.absorb.As<Step>(), GradientIn<G>({pending, call.pending.dtype}),
                            call.publish.As<Step>(), GradientIn<G>({gradient, call.gradient.dtype}),
                            ThetaOut<T>({theta, call.theta.dtype}), 0, granules, nullptr, 0, lanes0, lanes1, lanes2,
                            lanes3);
    if constexpr (kKind.absorb) {
      std::memcpy(block.p, p, n * sizeof(*p));
      for (size_t moment = 0; moment < kMoments; ++moment) {
        std::memcpy(block.codes[moment], codes[moment], n);
        *block.scales[moment] = scales[moment];
      }
    }
    if constexpr (kKind.theta) {
      const size_t bytes = DTypeBytes(call.theta.dtype);
      std::memcpy(static_cast<std::byte*>(call.theta.data) + first * bytes, theta, n * bytes);
    }
  }

  template <Kind kKind, class G, class T>
  static void Run(const Call& call) {
    const DoubleTag dd;
    const Step absorb = call.absorb.As<Step>(), publish = call.publish.As<Step>();
    const GradientIn<G> pending(call.pending), gradient(call.gradient);
    const ThetaOut<T> theta(call.theta);
    const size_t ahead = PrefetchElements();
    auto lanes0 = hn::Zero(dd), lanes1 = hn::Zero(dd), lanes2 = hn::Zero(dd), lanes3 = hn::Zero(dd);
    if constexpr (kKind.norm) LoadLanes(*call.norm, lanes0, lanes1, lanes2, lanes3);
    const size_t whole = call.first + (call.n - call.first) / kCodeBlock * kCodeBlock;
    for (size_t i = call.first; i < whole; i += kCodeBlock) {
      RunBlock<kKind, G, T>(Block(call.state, i), call.state.rounding, absorb, pending, publish, gradient, theta, i,
                            kCodeBlock, call.undo, ahead, lanes0, lanes1, lanes2, lanes3);
    }
    if (whole < call.n) RunTail<kKind, G, T>(call, whole, call.n - whole, lanes0, lanes1, lanes2, lanes3);
    hwy::FlushStream();  // before anybody is told that theta is there
    if constexpr (kKind.norm) StoreLanes(lanes0, lanes1, lanes2, lanes3, *call.norm);
  }
};

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_BLOCK_LOOP_INL_H_
