// Whether to speculate in the next step.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_SPECULATION_H_
#define SUPEROFFLOAD_SERVER_ENGINE_SPECULATION_H_

#include <algorithm>
#include <cstdint>

namespace superoffload::engine {

enum class SpeculationPolicy : uint8_t { kAlways, kNever, kAdaptive };

// A saturating counter, as branch predictors have: speculation pays while it stands on more steps than not, because
// undoing it costs about what it saves. A single clipped step does not stop it. Steps that did not speculate teach it
// too.
class SpeculationPredictor {
 public:
  explicit SpeculationPredictor(SpeculationPolicy policy) : policy_(policy) {}

  SpeculationPolicy policy() const { return policy_; }
  void set_policy(SpeculationPolicy policy) { policy_ = policy; }

  bool ShouldSpeculate() const {
    return policy_ == SpeculationPolicy::kAlways || (policy_ == SpeculationPolicy::kAdaptive && counter_ >= kThreshold);
  }

  // `stood`: the verdict left, or would have left, speculative parameters as they were.
  void Learn(bool stood) { counter_ = std::clamp(counter_ + (stood ? 1 : -1), 0, kMax); }

 private:
  static constexpr int kMax = 3;
  static constexpr int kThreshold = 2;

  SpeculationPolicy policy_;
  int counter_ = kMax;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_SPECULATION_H_
