// The host that this runs on, as the simulator sees it: measured by adam_bench, as `superoffloadctl bench` measures a
// machine for the planner.
#ifndef SUPEROFFLOAD_TESTS_SIMULATION_MEASURED_HOST_H_
#define SUPEROFFLOAD_TESTS_SIMULATION_MEASURED_HOST_H_

#include <vector>

#include "server/simulator/machine.h"

namespace superoffload {

// Some seconds. Aborts where the benchmark fails.
simulator::Machine MeasureHost();

// The median of each number, for a daemon with one worker whose memory the trainer maps: there is no link to cross, and
// no GPU.
simulator::Machine WithoutLink(const std::vector<simulator::Machine>& measured);

}  // namespace superoffload

#endif  // SUPEROFFLOAD_TESTS_SIMULATION_MEASURED_HOST_H_
