#include "kernels/bench/machine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/adam/adam.h"
#include "kernels/bench/arrays.h"
#include "kernels/bench/team.h"
#include "kernels/elements/elements.h"

namespace superoffload::kernels {
namespace {

// The first pass warms up and does not count.
double MedianSeconds(int repetitions, const std::function<void()>& pass) {
  std::vector<double> seconds;
  for (int i = 0; i <= repetitions; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    pass();
    if (i > 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

double UpdateBandwidth(const Baselines& baselines, size_t elements, DType dtype, int threads, int repetitions) {
  constexpr double kBytes = 24;  // three fp32 arrays, read and written
  Team team(threads);
  const Arrays arrays(elements, dtype, dtype, team);
  const double seconds = MedianSeconds(repetitions, [&] {
    team.RunChunks(elements / kChunkElements, [&](size_t chunk, int) {
      baselines.update_in_place(kChunkElements, arrays.state(chunk * kChunkElements));
    });
  });
  return kBytes * static_cast<double>(elements) / seconds;
}

// Arrays of so many elements stay in the second-level cache.
constexpr size_t kCached = 8 << 10;

// Of one core; `pass` is over kCached elements.
double CachedSeconds(Team& team, int repetitions, const std::function<void()>& pass) {
  constexpr int kPasses = 200;
  const double seconds = MedianSeconds(repetitions, [&] {
    team.RunChunks(1, [&](size_t, int) {
      for (int i = 0; i < kPasses; ++i) pass();
    });
  });
  return seconds / kPasses / kCached;
}

}  // namespace

MeasuredMachine MeasureMachine(const Baselines& baselines, size_t elements, DType dtype, int repetitions) {
  MeasuredMachine machine;
  machine.memory_bytes =
      static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  machine.cores = static_cast<int>(AvailableCores().size());
  machine.bandwidth = UpdateBandwidth(baselines, elements, dtype, machine.cores, repetitions);
  machine.core_bandwidth = UpdateBandwidth(baselines, elements, dtype, 1, repetitions);
  Team team(1);
  const Arrays a(kChunkElements, dtype, dtype, team);
  const StepConstants step = kAdamW.make_constants(kAdamW.DefaultScalars().data(), 100, 1);
  const AlgorithmKernels& kernels = kAdamW.best();
  machine.absorb = CachedSeconds(team, repetitions,
                                 [&] { kernels.absorb(0, kCached, a.state(0).view(), step, a.pending(0), nullptr); });
  machine.publish = CachedSeconds(team, repetitions, [&] {
    NormLanes norm;
    kernels.publish(0, kCached, a.state(0).view(), step, a.gradient(0), a.theta(0), &norm);
  });
  machine.publish_masters = CachedSeconds(team, repetitions, [&] { Narrow(kCached, a.state(0).p, a.theta(0)); });
  return machine;
}

std::string MachineText(const MeasuredMachine& machine, const std::string& like) {
  return absl::StrFormat(
      "# A MachineDescription of plan.proto, measured by adam_bench. GPU and link are those of `like`.\n"
      "name: \"measured\"\n"
      "like: \"%s\"\n"
      "source: \"adam_bench: three arrays updated in place, and passes over arrays in the caches of one core\"\n"
      "host {\n  memory_bytes: %d\n  cores: %d\n  bandwidth: %.4g\n  core_bandwidth: %.4g\n}\n"
      "passes {\n  absorb: %.4g\n  publish: %.4g\n  publish_masters: %.4g\n}\n",
      like, machine.memory_bytes, machine.cores, machine.bandwidth, machine.core_bandwidth, machine.absorb,
      machine.publish, machine.publish_masters);
}

}  // namespace superoffload::kernels
