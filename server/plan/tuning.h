// Which bucket size and how many resident buckets make a step shortest: found by simulating some.
#ifndef SUPEROFFLOAD_SERVER_PLAN_TUNING_H_
#define SUPEROFFLOAD_SERVER_PLAN_TUNING_H_

#include <optional>
#include <string>

#include "server/plan/question.h"
#include "server/simulator/outcome.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::plan {

// A step as asked for: our schedule with the settings of the question.
simulator::Outcome SimulateOurs(const Question& question, const simulator::Workload& workload,
                                const simulator::RunOptions& options);

// With as many residents as trainers come to (GpuOptions(resident_buckets="auto")): while a step waits for parameters,
// twice as many, as far as they fit into what else leaves of the GPU's memory. `without`: the step without any.
// Nothing: they stay without, or are not up to trainers.
std::optional<Question> WithAutoResidents(const Question& question, const simulator::Workload& workload,
                                          simulator::RunOptions options, const simulator::Outcome& without);

// What two slots would take and gain, of a question with one.
std::string PriceOfLessRoom(const Question& question, const simulator::Workload& workload,
                            const simulator::RunOptions& options, double step_seconds);

// Tries others of what fits in HBM; what shortens the step by a hundredth or more goes into the recommendation.
// `step_seconds` is of the step as asked for.
void RecommendBuckets(const Question& question, const simulator::Workload& workload, simulator::RunOptions options,
                      double step_seconds, v1::Recommendation& recommendation);

}  // namespace superoffload::plan

#endif  // SUPEROFFLOAD_SERVER_PLAN_TUNING_H_
