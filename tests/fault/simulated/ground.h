// What every part of a simulated run stands on: time, chance, the log, and the memory that outlives processes.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_GROUND_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_GROUND_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/engine/layout.h"
#include "server/simulator/virtual_clock.h"
#include "server/simulator/virtual_time.h"
#include "tests/fault/simulated/death_plan.h"
#include "tests/fault/simulated/event_log.h"
#include "tests/fault/simulated/mortal_algorithm.h"
#include "tests/fault/simulated/random_source.h"
#include "tests/fault/simulated/scenario.h"
#include "tests/support/sequential_optimizer.h"

namespace superoffload::faults {

// Something is wrong; the run is over.
struct SimulationFailed {
  std::string what;
};

template <typename... Parts>
[[noreturn]] void Fail(const Parts&... parts) {
  throw SimulationFailed{absl::StrCat(parts...)};
}

struct Ground {
  Ground(uint64_t seed, bool gpu, bool verbose)
      : clock(&time),
        random(seed),
        log(&time, verbose),
        scenario(MakeScenario(random, gpu)),
        layout(*engine::PlanLayout(scenario.spec)),
        memory(layout),
        deaths(scenario.deaths, &random, &log),
        kernel_deaths(&deaths, &random) {}

  // Where parameters are published.
  std::vector<std::byte>& published() { return memory.published(layout); }
  uint32_t buckets() const { return static_cast<uint32_t>(layout.buckets.size()); }

  simulator::VirtualTime time;
  simulator::VirtualClock clock;
  RandomSource random;
  EventLog log;
  const Scenario scenario;
  const engine::Layout layout;
  test::Memory memory;
  DeathPlan deaths;
  KernelDeaths kernel_deaths;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_GROUND_H_
