// What a seed stands for: a model, a policy, a number of workers, what the trainer does, and who may die how often.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SCENARIO_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SCENARIO_H_

#include <cstddef>
#include <cstdint>

#include "server/engine/spec.h"
#include "server/engine/speculation.h"
#include "superoffload/superoffload_gpu.h"
#include "tests/fault/simulated/death_plan.h"
#include "tests/fault/simulated/random_source.h"

namespace superoffload::faults {

struct Scenario {
  engine::OptimizerSpec spec;
  engine::SpeculationPolicy policy = engine::SpeculationPolicy::kAlways;
  size_t workers = 1;
  // The trainer's parameters and gradients lie in a GPU's memory: enum superoffload_mover. AUTO: it has none.
  uint32_t mover = SUPEROFFLOAD_MOVER_AUTO;
  uint32_t stream_slots = 0;  // in GPU memory, for units of parameters; 0: all of them stay there
  uint64_t steps = 1;         // to commit
  bool run = false;           // of several ranks, of which this is one: each step is prepared, and others may commit it
  bool snapshots = false;
  uint32_t restores = 0;  // of checkpoints, at most
  double clip = 0;        // chances per step
  double leave = 0;       // the trainer detaches, and attaches again
  double edit = 0;        // of parameters that are pushed
  double bad = 0;         // a gradient that is not finite; of a run, of another rank's as well
  double abandon = 0;
  double revise = 0;  // hyper-parameters or scale change inside the step
  double measure = 0;
  double state_sum = 0;         // per bucket
  double absent = 0;            // per parameter
  uint32_t passes = 1;          // whose gradients are added up, at most
  double residents = 0;         // on the GPU, per attachment
  double change_residents = 0;  // how many there are
  double look = 0;              // at parameters that stream, whenever it likes
  double change_units = 0;      // which of those that stream have memory of their own
  DeathChances deaths;

  bool gpu() const { return mover != SUPEROFFLOAD_MOVER_AUTO; }
  bool daemon_copies() const { return mover == SUPEROFFLOAD_MOVER_DAEMON; }
};

Scenario MakeScenario(RandomSource& random, bool gpu);

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SCENARIO_H_
