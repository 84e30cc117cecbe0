// Where everything random of a simulated run comes from: the same seed gives the same run.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_RANDOM_SOURCE_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_RANDOM_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>

namespace superoffload::faults {

class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : bits_(seed) {}

  uint64_t Bits() { return bits_(); }
  uint64_t Below(uint64_t n) { return bits_() % n; }
  uint64_t Between(uint64_t least, uint64_t most) { return least + Below(most - least + 1); }
  double Unit() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }
  bool Chance(double p) { return Unit() < p; }

  // Seconds until something happens: mostly short, now and then so long that everything else overtakes it.
  double Delay() {
    const double u = Unit();
    return Chance(0.06) ? 60 * u : u * u;
  }

  template <typename T>
  const T& Pick(std::span<const T> values) {
    return values[Below(values.size())];
  }

 private:
  std::mt19937_64 bits_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_RANDOM_SOURCE_H_
