#include "kernels/bench/publish.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/algorithm.h"
#include "kernels/bench/arrays.h"
#include "kernels/bench/team.h"

namespace superoffload::kernels {
namespace {

struct Candidate {
  std::string name;
  std::function<void(size_t first)> run;  // over the chunk that begins there
  std::vector<double> seconds = {};
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void Measure(std::vector<Candidate>& candidates, size_t chunks, int repetitions) {
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      Candidate& candidate = candidates[(chunk + repetition) % candidates.size()];
      const auto begin = std::chrono::steady_clock::now();
      candidate.run(chunk * kChunkElements);
      candidate.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
  }
}

std::vector<Candidate> CandidatesOf(const Algorithm& algorithm, const Baselines& baselines, const Arrays& a,
                                    DType dtype) {
  const auto state = [&a, arrays = algorithm.arrays.size()](size_t first) {
    AdamArrays all = a.state(first);
    if (arrays < 3) all.v = nullptr;
    return all;
  };
  const StepConstants step = algorithm.make_constants(algorithm.DefaultScalars().data(), 100, 1);
  std::vector<Candidate> candidates{{"read_stream", [&, state, dtype](size_t first) {
                                       baselines.read_stream(kChunkElements, state(first), a.gradient(first).data,
                                                             a.theta(first).data, DTypeBytes(dtype));
                                     }}};
  for (const AlgorithmKernels* const kernels : algorithm.supported()) {
    if (kernels == &algorithm.scalar()) continue;
    candidates.push_back({kernels->target, [&a, state, step, kernels](size_t first) {
                            kernels->publish(0, kChunkElements, state(first).view(), step, a.gradient(first),
                                             a.theta(first), nullptr);
                          }});
    candidates.push_back({std::string(kernels->target) + ", with norm", [&a, state, step, kernels](size_t first) {
                            NormLanes norm;
                            kernels->publish(0, kChunkElements, state(first).view(), step, a.gradient(first),
                                             a.theta(first), &norm);
                          }});
  }
  return candidates;
}

}  // namespace

std::string MeasurePublish(const Baselines& baselines, size_t elements, DType dtype, int repetitions) {
  Team team(1);
  const Arrays arrays(elements, dtype, dtype, team);
  std::string text = absl::StrFormat("%-8s %-20s %6s %12s %14s\n", "", "", "bytes", "ns/element", "ratio to reads");
  for (const Algorithm* const algorithm : Algorithms()) {
    if (algorithm->in_fp32 != nullptr) continue;
    std::vector<Candidate> candidates = CandidatesOf(*algorithm, baselines, arrays, dtype);
    Measure(candidates, elements / kChunkElements, repetitions);
    const double reads = Median(candidates.front().seconds);
    for (const Candidate& candidate : candidates) {
      const double median = Median(candidate.seconds);
      absl::StrAppendFormat(&text, "%-8s %-20s %6d %12.3f %14.2f\n", std::string(algorithm->name), candidate.name,
                            algorithm->arrays.size() * sizeof(float) + 2 * DTypeBytes(dtype),
                            median / kChunkElements * 1e9, reads / median);
    }
  }
  return text;
}

}  // namespace superoffload::kernels
