// The words that elements are rounded with (random/rounding.h), for the sources that are compiled once per instruction
// set.
#ifndef SUPEROFFLOAD_KERNELS_VECTOR_PHILOX_INL_H_
#define SUPEROFFLOAD_KERNELS_VECTOR_PHILOX_INL_H_

#include <cstring>

#include "kernels/random/rounding.h"
#include "kernels/vector/codecs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace superoffload::kernels {
namespace {

constexpr size_t kGroupCounters = kRoundingGroup / 4;

// A counter in every lane: of 32 bits where there is an instruction for the upper half of products, else of 64 bits, of
// which the upper half is anything.
#ifdef __ARM_FEATURE_SVE
using CounterTag = hn::CappedTag<uint32_t, kGroupCounters>;
#else
using CounterTag = hn::CappedTag<uint64_t, kGroupCounters / 2>;
#endif
using Counters = hn::Vec<CounterTag>;

// high and low: the halves of x * multiplier.
HWY_INLINE void Multiply(Counters x, uint32_t multiplier, Counters& high, Counters& low) {
  const CounterTag d;
#ifdef __ARM_FEATURE_SVE
  const auto all = hn::FirstN(d, hn::Lanes(d));
  high = svmulh_n_u32_x(all, x, multiplier);
  low = svmul_n_u32_x(all, x, multiplier);
#else
  const hn::Repartition<uint32_t, CounterTag> d32;
  low = hn::MulEven(hn::BitCast(d32, x), hn::BitCast(d32, hn::Set(d, multiplier)));
  high = hn::ShiftRight<32>(low);
#endif
}

// Philox of counters `first` and those after it.
HWY_INLINE void PhiloxOf(PhiloxKey key, const PhiloxBlock& first, size_t after, Counters& x0, Counters& x1,
                         Counters& x2, Counters& x3) {
  const CounterTag d;
  x0 = hn::Iota(d, first.words[0] + static_cast<uint32_t>(after));
  x1 = hn::Set(d, first.words[1]);
  x2 = hn::Set(d, first.words[2]);
  x3 = hn::Set(d, first.words[3]);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    Counters high0, low0, high1, low1;
    Multiply(x0, kPhiloxMultipliers[0], high0, low0);
    Multiply(x2, kPhiloxMultipliers[1], high1, low1);
    x0 = hn::Xor(hn::Xor(high1, x1), hn::Set(d, key.words[0]));
    x2 = hn::Xor(hn::Xor(high0, x3), hn::Set(d, key.words[1]));
    x1 = low1;
    x3 = low0;
    key.words[0] += kPhiloxWeyl[0];
    key.words[1] += kPhiloxWeyl[1];
  }
}

// The words of a whole group, in the order of its elements.
HWY_INLINE void GroupWords(PhiloxKey key, const PhiloxBlock& first, uint32_t* to) {
  const CounterTag d;
  Counters x0, x1, x2, x3;
#ifdef __ARM_FEATURE_SVE
  for (size_t c = 0; c < kGroupCounters; c += hn::Lanes(d)) {
    PhiloxOf(key, first, c, x0, x1, x2, x3);
    hn::StoreU(x0, d, to + c);
    hn::StoreU(x1, d, to + kGroupCounters + c);
    hn::StoreU(x2, d, to + 2 * kGroupCounters + c);
    hn::StoreU(x3, d, to + 3 * kGroupCounters + c);
  }
#else
  const hn::Repartition<uint32_t, CounterTag> d32;
  const size_t lanes = hn::Lanes(d);
  Counters y0, y1, y2, y3;
  const auto store = [&](Counters lower, Counters upper, uint32_t* words) {
    hn::StoreU(hn::ConcatEven(d32, hn::BitCast(d32, upper), hn::BitCast(d32, lower)), d32, words);
  };
  for (size_t c = 0; c < kGroupCounters; c += 2 * lanes) {
    PhiloxOf(key, first, c, x0, x1, x2, x3);
    PhiloxOf(key, first, c + lanes, y0, y1, y2, y3);
    store(x0, y0, to + c);
    store(x1, y1, to + kGroupCounters + c);
    store(x2, y2, to + 2 * kGroupCounters + c);
    store(x3, y3, to + 3 * kGroupCounters + c);
  }
#endif
}

// words[j] is the word of element first + j of the range, for j below n. Inlined into every loop it would double what
// there is to compile.
[[maybe_unused]] HWY_NOINLINE void RoundingWords(const Rounding& rounding, uint32_t step, uint32_t pair, size_t first,
                                                 size_t n, uint32_t* words) {
  for (size_t j = 0; j < n;) {
    const BoxElements::Place place = rounding.box->Find(rounding.first + first + j);
    const size_t count = static_cast<size_t>(HWY_MIN(place.count, static_cast<uint64_t>(n - j)));
    for (size_t k = 0; k < count;) {
      const uint64_t element = place.element + k;
      const size_t in_group = element % kRoundingGroup, wanted = HWY_MIN(kRoundingGroup - in_group, count - k);
      const PhiloxBlock counter = RoundingCounter(step, element / kRoundingGroup, pair);
      if (wanted == kRoundingGroup) {
        GroupWords(rounding.key, counter, words + j + k);
      } else {
        HWY_ALIGN uint32_t group[kRoundingGroup];
        GroupWords(rounding.key, counter, group);
        std::memcpy(words + j + k, group + in_group, wanted * sizeof(uint32_t));
      }
      k += wanted;
    }
    j += count;
  }
}

}  // namespace
}  // namespace superoffload::kernels
HWY_AFTER_NAMESPACE();

#endif  // SUPEROFFLOAD_KERNELS_VECTOR_PHILOX_INL_H_
