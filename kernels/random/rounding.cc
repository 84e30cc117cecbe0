#include "kernels/random/rounding.h"

namespace superoffload::kernels {

// FNV-1a.
uint64_t RoundingHash(std::string_view parameter) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char character : parameter) hash = (hash ^ static_cast<uint8_t>(character)) * 0x100000001b3;
  return hash;
}

// One block of Philox under the seed: neighbours' keys have nothing in common.
PhiloxKey RoundingKey(uint64_t seed, uint64_t hash) {
  const PhiloxKey seeded{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const PhiloxBlock block = Philox(seeded, {static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32), 0, 0});
  return {block.words[0], block.words[1]};
}

bool BoxElements::Make(std::span<const uint64_t> shape, std::span<const uint64_t> global_shape,
                       std::span<const uint64_t> global_offset, BoxElements* box) {
  *box = BoxElements();
  box->run_ = 1;
  uint64_t stride = 1;  // of the dimension in the whole tensor
  bool follows = true;  // what is inside of this dimension is whole: runs grow through it
  for (size_t d = shape.size(); d-- > 0;) {
    box->first_ += global_offset[d] * stride;
    if (follows) {
      box->run_ *= shape[d];
    } else if (shape[d] > 1) {
      Level* const inner = box->levels_ == 0 ? nullptr : &box->level_[box->levels_ - 1];
      if (inner != nullptr && inner->stride * inner->count == stride) {
        inner->count *= shape[d];
      } else {
        if (box->levels_ == kMaxLevels) return false;
        box->level_[box->levels_++] = {shape[d], stride};
      }
    }
    follows = follows && shape[d] == global_shape[d];
    stride *= global_shape[d];
  }
  if (box->levels_ == 0) box->run_ = ~uint64_t{0};  // one run; counting goes on behind it
  return true;
}

}  // namespace superoffload::kernels
