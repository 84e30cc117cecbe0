#define HWY_COMPILE_ONLY_STATIC
#include "kernels/bench/baselines.h"

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, 16>;

// As our kernels do: a limit that others reach only without it would flatter them.
constexpr size_t kPrefetchElements = 512;

void UpdateInPlace(size_t n, AdamArrays arrays) {
  const FloatTag d;
  const auto factor = hn::Set(d, 0.999f), addend = hn::Set(d, 1e-6f);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    for (float* array : {arrays.p, arrays.m, arrays.v}) {
      hwy::Prefetch(array + i + kPrefetchElements);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, array + i), factor, addend), d, array + i);
    }
  }
}

void Triad(size_t n, float* a, const float* b, const float* c) {
  const FloatTag d;
  const auto three = hn::Set(d, 3.0f);
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    hwy::Prefetch(b + i + kPrefetchElements);
    hwy::Prefetch(c + i + kPrefetchElements);
    hn::StoreU(hn::MulAdd(three, hn::LoadU(d, c + i), hn::LoadU(d, b + i)), d, a + i);
  }
}

// In steps of one vector of theta: one or two of the state.
template <class T, class... State>
void ReadStreamOf(size_t n, const T* gradient, T* theta, const State*... state) {
  const FloatTag d;
  const hn::Repartition<T, FloatTag> dt;
  for (size_t i = 0; i < n; i += hn::Lanes(dt)) {
    auto sum = hn::Zero(d);
    for (size_t j = i; j < i + hn::Lanes(dt); j += hn::Lanes(d)) {
      for (const float* array : {state...}) {
        hwy::Prefetch(array + j + kPrefetchElements);
        sum = hn::Add(sum, hn::LoadU(d, array + j));
      }
    }
    hwy::Prefetch(gradient + i + kPrefetchElements);
    hn::Stream(hn::Xor(hn::BitCast(dt, sum), hn::LoadU(dt, gradient + i)), dt, theta + i);
  }
  hwy::FlushStream();
}

void ReadStream(size_t n, AdamArrays state, const void* gradient, void* theta, size_t width) {
  const auto read = [&](const auto* from, auto* to) {
    state.v == nullptr ? ReadStreamOf(n, from, to, state.p, state.m)
                       : ReadStreamOf(n, from, to, state.p, state.m, state.v);
  };
  if (width == sizeof(uint16_t)) {
    read(static_cast<const uint16_t*>(gradient), static_cast<uint16_t*>(theta));
  } else {
    read(static_cast<const uint32_t*>(gradient), static_cast<uint32_t*>(theta));
  }
}

void PeerStepOver(size_t n, AdamArrays state, const PeerStep& step, const float* gradient) {
  const FloatTag d;
  constexpr size_t kUnroll = 8;
  const size_t vector = hn::Lanes(d);
  const auto beta1 = hn::Set(d, step.beta1), beta2 = hn::Set(d, step.beta2), eps = hn::Set(d, step.eps);
  const auto one_minus_beta1 = hn::Set(d, 1 - step.beta1), one_minus_beta2 = hn::Set(d, 1 - step.beta2);
  const auto weight_decay = hn::Set(d, step.weight_decay), step_size = hn::Set(d, step.step_size);
  const auto bias_correction2 = hn::Set(d, step.bias_correction2);
  for (size_t first = 0; first < n; first += kUnroll * vector) {
#pragma GCC unroll 8
    for (size_t i = first; i < first + kUnroll * vector; i += vector) {
      const auto g = hn::LoadU(d, gradient + i);
      auto p = hn::LoadU(d, state.p + i);
      p = hn::MulAdd(p, weight_decay, p);
      const auto m = hn::MulAdd(hn::LoadU(d, state.m + i), beta1, hn::Mul(g, one_minus_beta1));
      const auto v = hn::MulAdd(hn::LoadU(d, state.v + i), beta2, hn::Mul(hn::Mul(g, g), one_minus_beta2));
      const auto denominator = hn::MulAdd(hn::Sqrt(v), bias_correction2, eps);
      p = hn::MulAdd(hn::Div(m, denominator), step_size, p);
      hn::StoreU(p, d, state.p + i);
      hn::StoreU(m, d, state.m + i);
      hn::StoreU(v, d, state.v + i);
    }
  }
}

void PeerCast(size_t n, const float* p, uint16_t* theta) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<uint16_t, FloatTag> dh;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto bits = hn::BitCast(du, hn::LoadU(d, p + i));
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(hn::RebindToSigned<FloatTag>(), rounded)), dh, theta + i);
  }
}

}  // namespace

extern const Baselines SUPEROFFLOAD_TABLE;
const Baselines SUPEROFFLOAD_TABLE{UpdateInPlace, Triad, ReadStream, PeerStepOver, PeerCast};

}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();
