#include "client/src/core/step_progress.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace superoffload::client {

bool StepProgress::Take(const superoffload_ring_entry& entry) {
  if (entry.step > step_) Begin(entry.step);
  if (entry.step < step_) return false;  // of a step that is over, or of none
  switch (entry.opcode) {
    case SUPEROFFLOAD_COMPLETE_VERDICT:
      return TakeVerdict(entry);
    case SUPEROFFLOAD_COMPLETE_GRADIENT_NORM:
      norm_ = {entry.payload.f64[0], entry.payload.f64[1]};
      break;
    case SUPEROFFLOAD_COMPLETE_PREPARED:
      prepared_ = entry.payload.prepared;
      break;
    case SUPEROFFLOAD_COMPLETE_PARAMETERS_READY:
      if (entry.index < published_.size()) {
        TakeParameters(entry.index, (entry.flags & SUPEROFFLOAD_FLAG_SPECULATIVE) != 0);
      }
      break;
    case SUPEROFFLOAD_COMPLETE_LANDED:
      if (entry.index < landing_.size() && landing_[entry.index]) {
        SUPEROFFLOAD_CHECK_LT(0u, landings_);
        landing_[entry.index] = false;
        --landings_;
      }
      break;
    default:
      break;
  }
  return false;
}

void StepProgress::Begin(uint64_t step) {
  step_ = step;
  verdict_.reset();
  norm_.reset();
  prepared_.reset();
  std::fill(published_.begin(), published_.end(), Published::kNo);
  std::fill(landing_.begin(), landing_.end(), false);
  unfinished_ = landings_ = 0;
}

// Before the verdict the last word counts; after it only a bucket that the verdict left to come is of interest.
void StepProgress::TakeParameters(uint32_t bucket, bool speculative) {
  if (!verdict_) {
    published_[bucket] = speculative ? Published::kSpeculative : Published::kFinal;
  } else if (published_[bucket] != Published::kFinal && (!speculative || stands_)) {
    SUPEROFFLOAD_CHECK_LT(0u, unfinished_);
    published_[bucket] = Published::kFinal;
    --unfinished_;
  }
}

bool StepProgress::TakeVerdict(const superoffload_ring_entry& entry) {
  if (verdict_) return false;
  const superoffload_verdict_payload& payload = entry.payload.verdict;
  verdict_ = superoffload_verdict{.kind = entry.index,
                                  .speculated_buckets = payload.speculated_buckets,
                                  .republished_buckets = payload.republished_buckets,
                                  .next_slot = payload.next_slot,
                                  .consecutive_skips = payload.consecutive_skips,
                                  .step = entry.step,
                                  .committed_steps = payload.committed_steps,
                                  .global_norm = payload.global_norm,
                                  .clip_coefficient = payload.clip_coefficient};
  SetNext(payload.next_slot, payload.committed_steps);
  stands_ = (entry.flags & SUPEROFFLOAD_FLAG_SPECULATION_STANDS) != 0;
  const bool commits = entry.index == SUPEROFFLOAD_VERDICT_COMMIT || entry.index == SUPEROFFLOAD_VERDICT_CLIP;
  for (Published& published : published_) {
    // Speculated parameters stand or are published again; the others of a skipped step never changed.
    if (published == Published::kSpeculative ? stands_ : !commits) published = Published::kFinal;
    if (published != Published::kFinal) ++unfinished_;
  }
  return commits;
}

void StepProgress::ExpectLanding(uint32_t bucket) {
  SUPEROFFLOAD_CHECK(verdict_.has_value());
  SUPEROFFLOAD_CHECK(!landing_[bucket], "bucket ", bucket);
  landing_[bucket] = true;
  ++landings_;
}

}  // namespace superoffload::client
