// Stochastic rounding whose random bits belong to an element of a tensor at a step, whoever rounds it: they depend on
// the seed of the optimizer, the parameter's name, its own step count, the state array and the place of the element in
// the whole tensor; not on threads, instruction sets, shards, or how often a step is computed.
//
// Elements draw in groups of 64: Philox's counters 16 * group to 16 * group + 15 give four words each, and word w of
// counter c is element 16 * w + c of the group. Two arrays share a word of an element, and each rounds with its half.
#ifndef SUPEROFFLOAD_KERNELS_RANDOM_ROUNDING_H_
#define SUPEROFFLOAD_KERNELS_RANDOM_ROUNDING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/float_conversion.h"
#include "kernels/random/philox.h"

namespace superoffload::kernels {

inline constexpr size_t kRoundingGroup = 64;

// Of all that a parameter draws: under a seed, by the hash of its name.
uint64_t RoundingHash(std::string_view parameter);
PhiloxKey RoundingKey(uint64_t seed, uint64_t hash);

// The counters of an element's group: those of its 16 blocks differ in the first word only, by 0 to 15.
SUPEROFFLOAD_HOST_DEVICE constexpr PhiloxBlock RoundingCounter(uint32_t step, uint64_t group, uint32_t pair) {
  const uint64_t first = group * (kRoundingGroup / 4);
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32), step, pair};
}

// Arrays 2k-1 and 2k are pair k, whose words are shared: the first of them has the lower half. Array 0 has a pair of
// its own.
SUPEROFFLOAD_HOST_DEVICE constexpr uint32_t RoundingPair(size_t array) {
  return static_cast<uint32_t>((array + 1) / 2);
}

// What the arrays of a pair share.
SUPEROFFLOAD_HOST_DEVICE constexpr uint32_t RoundingWord(PhiloxKey key, uint32_t step, uint64_t element,
                                                         uint32_t pair) {
  const uint32_t in_group = static_cast<uint32_t>(element % kRoundingGroup);
  PhiloxBlock counter = RoundingCounter(step, element / kRoundingGroup, pair);
  counter.words[0] += in_group % 16;
  return Philox(key, counter).words[in_group / 16];
}

// 16 random bits: an array's of its pair's word.
SUPEROFFLOAD_HOST_DEVICE constexpr uint32_t RoundingHalf(uint32_t word, size_t array) {
  return array % 2 == 1 ? word & 0xffff : word >> 16;
}

// One of the two neighbours in bf16, the upper with the probability of the distance to the lower; numbers that bf16
// has stay what they are. A NaN becomes the quiet NaN of its sign. `bits`: 16 random ones.
SUPEROFFLOAD_HOST_DEVICE constexpr uint16_t RoundToBFloat16(float value, uint32_t bits) {
  const uint32_t number = std::bit_cast<uint32_t>(value);
  if ((number & 0x7fffffff) > kFloatInfinity) return static_cast<uint16_t>((number >> 16 & 0x8000) | 0x7fc0);
  return static_cast<uint16_t>((number + bits) >> 16);
}

// A master weight that is kept in bf16. `word`: of its pair, which no moment shares.
SUPEROFFLOAD_HOST_DEVICE constexpr float RoundedMaster(float p, uint32_t word) {
  return WidenBFloat16(RoundToBFloat16(p, RoundingHalf(word, 0)));
}

// The elements of a shard, a box of a tensor in row-major order, within the whole tensor.
class BoxElements {
 public:
  static constexpr size_t kMaxLevels = 6;

  BoxElements() = default;  // the whole tensor

  // `shape` at `offset` of `global_shape`; all of one length. False: too many dimensions are cut (kMaxLevels).
  static bool Make(std::span<const uint64_t> shape, std::span<const uint64_t> global_shape,
                   std::span<const uint64_t> global_offset, BoxElements* box);

  // Where element `i` of the shard is, counting on beyond its end, and how many follow it there without a gap.
  struct Place {
    uint64_t element, count;
  };
  SUPEROFFLOAD_HOST_DEVICE Place Find(uint64_t i) const {
    if (levels_ == 0 && i < run_) return {first_ + i, run_ - i};  // a GPU divides slowly
    const uint64_t in_run = i % run_;
    uint64_t element = first_ + in_run, rest = i / run_;
    for (size_t level = 0; level < levels_; ++level) {
      element += rest % level_[level].count * level_[level].stride;
      rest /= level_[level].count;
    }
    return {element, run_ - in_run};
  }

 private:
  struct Level {
    uint64_t count, stride;
  };

  uint64_t first_ = 0;
  uint64_t run_ = ~uint64_t{0};
  size_t levels_ = 0;  // innermost first
  Level level_[kMaxLevels] = {};
};

// What a range of state is rounded with.
struct Rounding {
  PhiloxKey key;
  const BoxElements* box = nullptr;
  uint64_t first = 0;  // which of the shard's elements element 0 of the range is; modulo 2^64, before the first one too
};

// Of element `i` of the range.
inline uint32_t ElementWord(const Rounding& rounding, uint32_t step, uint64_t i, uint32_t pair) {
  return RoundingWord(rounding.key, step, rounding.box->Find(rounding.first + i).element, pair);
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_RANDOM_ROUNDING_H_
