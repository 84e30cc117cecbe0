// When processes die: at an event, between two stores of the record, or inside a kernel. Each run has a number of
// deaths to spend, so that it ends.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_DEATH_PLAN_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_DEATH_PLAN_H_

#include <algorithm>
#include <cstdint>

#include "server/engine/platform.h"
#include "tests/fault/simulated/event_log.h"
#include "tests/fault/simulated/random_source.h"

namespace superoffload::faults {

// Thrown where the daemon dies, through the engine, which is never called again.
struct ProcessDied {};

// Chances that the one who does the thing dies of it.
struct DeathChances {
  uint32_t daemon_deaths = 0;  // at most
  uint32_t trainer_deaths = 0;
  double event = 0;
  double store = 0;
  double kernel = 0;
  double hard_times_factor = 1;
};

class DeathPlan final : public engine::Deaths {
 public:
  DeathPlan(const DeathChances& chances, RandomSource* random, EventLog* log)
      : chances_(chances), random_(*random), log_(*log) {}

  bool DaemonDies() {
    return Draw(chances_.event * std::max(factor_, run_factor_), &chances_.daemon_deaths, "at an event");
  }
  bool TrainerDies() { return Draw(chances_.event * run_factor_, &chances_.trainer_deaths, "trainer"); }

  // Called by the engine.
  void MayCome() override {
    if (dying_ ? random_.Chance(0.3) : Draw(chances_.store * factor_, &chances_.daemon_deaths, "between stores")) {
      throw ProcessDied();
    }
  }

  // Whether this call of a kernel is cut off.
  bool InKernel() {
    return dying_ ? random_.Chance(0.5) : Draw(chances_.kernel * factor_, &chances_.daemon_deaths, "in a kernel");
  }

  // The daemon is dead, and its workers' last instructions are played: they come to any point.
  void set_dying(bool dying) { dying_ = dying; }
  // While something goes on that is seldom: recovery, pushing, pulling, restoring.
  void set_hard_times(bool hard) { factor_ = hard ? chances_.hard_times_factor : 1; }
  // A rank has contributed to a step that is not decided: a few events in many, and an agreement follows each death.
  void set_contributed(bool contributed) { run_factor_ = contributed ? kRunFactor : 1; }

 private:
  static constexpr double kRunFactor = 30;

  bool Draw(double chance, uint32_t* left, const char* what) {
    if (*left == 0 || !random_.Chance(chance)) return false;
    --*left;
    log_.Add("death", what, *left);
    return true;
  }

  DeathChances chances_;
  RandomSource& random_;
  EventLog& log_;
  bool dying_ = false;
  double factor_ = 1, run_factor_ = 1;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_DEATH_PLAN_H_
