// What completions have told of the step under way: its norm, its verdict, and which buckets' parameters are final.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_PROGRESS_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_PROGRESS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "superoffload/superoffload.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::client {

// Not thread-safe. The daemon's entries are not believed: one that makes no sense changes nothing.
class StepProgress {
 public:
  StepProgress(uint64_t last_step, uint32_t buckets)
      : step_(last_step), published_(buckets, Published::kNo), landing_(buckets, false) {}

  // Any completion but ERROR. Whether it was a verdict to commit or to clip.
  bool Take(const superoffload_ring_entry& entry);

  // After such a verdict: the daemon has yet to copy the bucket's parameters to the GPU.
  void ExpectLanding(uint32_t bucket);

  uint64_t step() const { return step_; }  // the latest of which something is known
  const std::optional<superoffload_verdict>& verdict() const { return verdict_; }
  struct Norm {
    double norm = 0;
    double sum_of_squares = 0;
  };
  const std::optional<Norm>& norm() const { return norm_; }
  const std::optional<superoffload_prepared_payload>& prepared() const { return prepared_; }
  bool IsFinal(uint32_t bucket) const {
    return verdict_ && published_[bucket] == Published::kFinal && !landing_[bucket];
  }
  bool IsOver() const { return verdict_ && unfinished_ == 0 && landings_ == 0; }

  // The host's gradient slot that the next step fills.
  uint32_t next_slot() const { return next_slot_; }
  uint64_t committed_steps() const { return committed_steps_; }
  void SetNext(uint32_t slot, uint64_t committed_steps) {
    next_slot_ = slot;
    committed_steps_ = committed_steps;
  }

 private:
  enum class Published : uint8_t { kNo, kSpeculative, kFinal };

  void Begin(uint64_t step);
  bool TakeVerdict(const superoffload_ring_entry& entry);
  void TakeParameters(uint32_t bucket, bool speculative);

  uint64_t step_;
  std::optional<superoffload_verdict> verdict_;
  std::optional<Norm> norm_;
  std::optional<superoffload_prepared_payload> prepared_;
  std::vector<Published> published_;
  std::vector<bool> landing_;
  uint32_t unfinished_ = 0;  // buckets whose parameters the verdict left to come
  uint32_t landings_ = 0;    // buckets that are landing
  uint32_t next_slot_ = 0;
  uint64_t committed_steps_ = 0;
  bool stands_ = false;  // with the verdict: what was speculated is final
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_STEP_PROGRESS_H_
