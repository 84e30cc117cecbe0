// What a simulated trainer does otherwise as a rank of a run of several. The other ranks are not there: their gradients
// are zeros, or not finite, and one of them may have committed a step to which this one has contributed.
#include <cmath>
#include <limits>

#include "tests/fault/simulated/simulated_trainer.h"

namespace superoffload::faults {

// The sum has left for the other ranks.
void SimulatedTrainer::Contribute() {
  const superoffload_prepared_payload& prepared = *progress_->prepared();
  const double others = attempt_.bad_elsewhere ? std::numeric_limits<double>::infinity() : 0;
  contribution_ = {prepared.attempt, prepared.sum_of_squares + others, std::nullopt};
  ground_.deaths.set_contributed(true);
}

// The attempt is decided.
void SimulatedTrainer::ForgetContribution() {
  contribution_.reset();
  ground_.deaths.set_contributed(false);
}

std::optional<double> SimulatedTrainer::CommittedElsewhere(uint64_t attempt) {
  if (!contribution_ || contribution_->attempt != attempt || !std::isfinite(contribution_->total)) return std::nullopt;
  if (!contribution_->committed) contribution_->committed = ground_.random.Chance(0.5);
  return *contribution_->committed ? std::optional(contribution_->total) : std::nullopt;
}

// The attempt in question was not committed here.
void SimulatedTrainer::CheckNothingIsLost() {
  if (in_question_ && contribution_ && CommittedElsewhere(contribution_->attempt)) {
    Fail("another rank has committed attempt ", contribution_->attempt, ", and here it is lost");
  }
}

}  // namespace superoffload::faults
