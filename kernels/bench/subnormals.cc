#include "kernels/bench/subnormals.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {

int RunSubnormals() {
  constexpr size_t kElements = kChunkElements / 16;
  constexpr int kRuns = 20, kStepsPerRun = 250;
  std::printf("%-14s %12s %12s %8s\n", "kernels", "first ns", "slowest ns", "ratio");
  for (const AlgorithmKernels* kernels : kAdamW.supported()) {
    std::vector<float> p(kElements, 0.5f), m(kElements, 1e-3f), v(kElements, 1e-6f);
    const std::vector<uint16_t> gradient(kElements, 0);
    std::vector<uint16_t> theta(kElements);
    std::vector<double> nanoseconds;
    for (int run = 0; run < kRuns; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kStepsPerRun; ++i) {
        const auto t = static_cast<uint64_t>(run * kStepsPerRun + i + 1);
        const StepConstants step = kAdamW.make_constants(kAdamW.DefaultScalars().data(), t, 1);
        kernels->plain(0, kElements, {.arrays = {p.data(), m.data(), v.data()}}, step,
                       {gradient.data(), DType::kBFloat16}, {theta.data(), DType::kBFloat16});
      }
      const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
      nanoseconds.push_back(time.count() / kStepsPerRun / kElements);
    }
    const double slowest = *std::max_element(nanoseconds.begin(), nanoseconds.end());
    std::printf("%-14s %12.3f %12.3f %8.2f\n", kernels->target, nanoseconds.front(), slowest,
                slowest / nanoseconds.front());
  }
  return 0;
}

}  // namespace superoffload::kernels
