#include "server/simulator/outcome.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace superoffload::simulator {

Outcome MakeOutcome(const Machine& machine, const Workload& workload, double step_seconds,
                    std::vector<Exposed> exposed) {
  Outcome outcome;
  outcome.step_seconds = step_seconds;
  outcome.compute_seconds = workload.compute_seconds();
  outcome.tokens_per_second = workload.ranks * workload.tokens_per_step() / step_seconds;
  outcome.flops_per_second = workload.flops_per_step / step_seconds;
  outcome.utilisation = outcome.flops_per_second / machine.gpu.peak_flops;
  outcome.exposed_seconds = step_seconds - outcome.compute_seconds;
  double other = outcome.exposed_seconds;
  for (const Exposed& part : exposed) other -= part.seconds;
  if (std::abs(other) > 1e-9 * step_seconds) exposed.push_back({"other", other});
  std::erase_if(exposed, [](const Exposed& part) { return part.seconds == 0; });
  std::stable_sort(exposed.begin(), exposed.end(),
                   [](const Exposed& a, const Exposed& b) { return a.seconds > b.seconds; });
  outcome.exposed = std::move(exposed);
  return outcome;
}

}  // namespace superoffload::simulator
