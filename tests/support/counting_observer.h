// An observer of an engine that only counts its steps.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_COUNTING_OBSERVER_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_COUNTING_OBSERVER_H_

#include <atomic>

#include "server/engine/step_observer.h"

namespace superoffload::test {

class CountingObserver final : public engine::StepObserver {
 public:
  void OnPass(const engine::PassReport&) override {}
  void OnStep(const engine::StepReport&) override { ++steps; }

  std::atomic<int> steps{0};
};

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_COUNTING_OBSERVER_H_
