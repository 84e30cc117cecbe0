// Philox4x32-7 (Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3): a keyed
// bijection of counters, each of which gives four random words. With seven rounds it passes BigCrush (their table 2).
#ifndef SUPEROFFLOAD_KERNELS_RANDOM_PHILOX_H_
#define SUPEROFFLOAD_KERNELS_RANDOM_PHILOX_H_

#include <cstdint>

#include "kernels/host_device.h"

namespace superoffload::kernels {

inline constexpr int kPhiloxRounds = 7;
inline constexpr uint32_t kPhiloxMultipliers[2] = {0xd2511f53, 0xcd9e8d57};
inline constexpr uint32_t kPhiloxWeyl[2] = {0x9e3779b9, 0xbb67ae85};  // added to the key from round to round

struct PhiloxKey {
  uint32_t words[2] = {};

  bool operator==(const PhiloxKey&) const = default;
};

struct PhiloxBlock {
  uint32_t words[4] = {};

  bool operator==(const PhiloxBlock&) const = default;
};

SUPEROFFLOAD_HOST_DEVICE constexpr PhiloxBlock Philox(PhiloxKey key, PhiloxBlock counter) {
  constexpr PhiloxKey weyl{{kPhiloxWeyl[0], kPhiloxWeyl[1]}};  // a GPU has no arrays to look into
  PhiloxBlock x = counter;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultipliers[0]} * x.words[0];
    const uint64_t product1 = uint64_t{kPhiloxMultipliers[1]} * x.words[2];
    x = {static_cast<uint32_t>(product1 >> 32) ^ x.words[1] ^ key.words[0], static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ x.words[3] ^ key.words[1], static_cast<uint32_t>(product0)};
    for (int i = 0; i < 2; ++i) key.words[i] += weyl.words[i];
  }
  return x;
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_RANDOM_PHILOX_H_
