// One run: a trainer, a daemon and the checkpoints of its optimizer in virtual time, each with deaths as the seed has
// them; then bits, leaks and liveness are checked.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATION_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATION_H_

#include <cstdint>
#include <string>

namespace superoffload::faults {

struct SimulationResult {
  std::string failure;  // empty: none
  uint64_t hash = 0;    // of every event and of what was left in memory
  uint64_t events = 0;
  uint64_t daemon_lives = 0;
  uint64_t checkpoints = 0;
};

struct SimulationOptions {
  bool gpu = false;      // the trainer has one
  bool verbose = false;  // every event is printed
};

// A check of the code that fails aborts the process.
SimulationResult Simulate(uint64_t seed, const SimulationOptions& options);

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATION_H_
