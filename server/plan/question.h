// What a PlanRequest asks, in the types of the daemon: names resolved, defaults filled in, everything checked.
#ifndef SUPEROFFLOAD_SERVER_PLAN_QUESTION_H_
#define SUPEROFFLOAD_SERVER_PLAN_QUESTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/spec.h"
#include "server/engine/speculation.h"
#include "server/simulator/fit.h"
#include "server/simulator/machine.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

struct Question {
  simulator::Model model;
  simulator::Machine machine;
  std::string known_machine;   // whose numbers the machine has where it has none of its own; empty: none's
  engine::OptimizerSpec spec;  // of all parameters, as one rank alone would create it
  simulator::Pass pass;
  simulator::GpuUse gpu;
  uint32_t ranks = 1;
  engine::SpeculationPolicy speculation = engine::SpeculationPolicy::kAdaptive;
  bool clipping = false;
  double clip_rate = 0;
  double skip_rate = 0;
  double measured_tokens_per_second = 0;  // 0: not measured
  bool quick = false;
  v1::TimelineFormat timeline = v1::TIMELINE_FORMAT_UNSPECIFIED;

  simulator::GpuUse gpu_use() const {
    simulator::GpuUse use = gpu;
    use.gathers = ranks > 1;
    return use;
  }
  // How many buckets are resident; the daemon takes in their gradients `resident_steps` at a time.
  void SetResidents(uint32_t count);
  uint32_t resident_steps = 4;
  bool auto_residents = false;  // as many as trainers come to
  bool may_save_room = true;    // for gradients and published parameters, where the host has none

  // Of a machine with one memory, what the optimizer of rank 0 leaves of it.
  uint64_t gpu_bytes() const;
};

// INVALID_ARGUMENT, NOT_FOUND: a sentence that names the field and what it must be.
absl::StatusOr<Question> ToQuestion(const v1::PlanRequest& request);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_QUESTION_H_
