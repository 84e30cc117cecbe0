// Moments in fewer bytes than those that are asked for. They change results, so what they would gain is said, and they
// are never part of what is recommended.
#ifndef SUPEROFFLOAD_SERVER_PLAN_NARROWER_STATE_H_
#define SUPEROFFLOAD_SERVER_PLAN_NARROWER_STATE_H_

#include <optional>
#include <string>

#include "server/plan/question.h"
#include "server/simulator/outcome.h"
#include "server/simulator/workload.h"

namespace superoffload::plan {

// The widest with which the host's memory suffices, as a sentence; nothing where it does not suffice with any.
std::optional<std::string> NarrowerStateThatFits(const Question& question);

// What each would make of a step that takes `step_seconds`, as a sentence; nothing where none gains a hundredth.
std::optional<std::string> GainOfNarrowerState(const Question& question, const simulator::Workload& workload,
                                               simulator::RunOptions options, double step_seconds);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_NARROWER_STATE_H_
