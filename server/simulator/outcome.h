// What a simulated step came to: how long it takes, and what the GPU waits for in it.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_OUTCOME_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_OUTCOME_H_

#include <string>
#include <vector>

#include "server/simulator/machine.h"
#include "server/simulator/timeline.h"
#include "server/simulator/workload.h"

namespace superoffload::simulator {

// Time of a step in which the GPU computes nothing of the model, by what it waits for.
// The cause where all of them are in use; parameters are waited for otherwise.
inline constexpr char kDeviceSlots[] = "a device slot for a gradient";

struct Exposed {
  std::string cause;
  double seconds = 0;
};

// Of one step, after the first steps have filled what they fill.
struct Outcome {
  double step_seconds = 0;
  double compute_seconds = 0;    // of the model's kernels
  double tokens_per_second = 0;  // of all ranks
  double flops_per_second = 0;   // the model's own: Workload::flops_per_step
  double utilisation = 0;        // of the GPU's peak
  double exposed_seconds = 0;    // step_seconds - compute_seconds
  std::vector<Exposed> exposed;  // the sum is exposed_seconds; the largest first
  std::vector<Span> timeline;    // of the last two steps that were simulated, when asked for; cut off at both ends
};

// Whether less than a twentieth of the step is exposed: its length is that of the GPU's numbers, and holding it against
// a measurement tests nothing about offloading.
inline bool HidesOffloading(const Outcome& outcome) { return outcome.exposed_seconds < 0.05 * outcome.step_seconds; }

// Fills in what follows from a step's duration and from what was exposed by cause; what no cause explains is "other".
Outcome MakeOutcome(const Machine& machine, const Workload& workload, double step_seconds,
                    std::vector<Exposed> exposed);

struct RunOptions {
  double clip_rate = 0;  // share of steps that are clipped
  double skip_rate = 0;  // share of steps that are skipped; together at most 1
  bool timeline = false;
};

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_OUTCOME_H_
