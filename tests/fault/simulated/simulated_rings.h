// The rings of one attachment, in memory that outlives both sides: what is in them when a side dies, the other still
// reads.
#ifndef SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_RINGS_H_
#define SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_RINGS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "server/transport/step_entries.h"

namespace superoffload::faults {

class SimulatedRings final : public transport::CompletionEntries {
 public:
  // `on_completion` is called after each that was added.
  SimulatedRings(uint64_t epoch, std::function<void()> on_completion)
      : CompletionEntries(epoch), on_completion_(std::move(on_completion)) {}

  uint64_t epoch() const { return attachment_epoch(); }

  void GradientTaken(uint64_t step, uint32_t slot) {
    Push(Completion(SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN, slot, step));
  }
  void Landed(uint64_t step, uint32_t bucket) { Push(Completion(SUPEROFFLOAD_COMPLETE_LANDED, bucket, step)); }

  std::deque<superoffload_ring_entry> submissions, completions;

 private:
  void Push(const superoffload_ring_entry& entry) override {
    completions.push_back(entry);
    on_completion_();
  }

  const std::function<void()> on_completion_;
};

}  // namespace superoffload::faults

#endif  // SUPEROFFLOAD_TESTS_FAULT_SIMULATED_SIMULATED_RINGS_H_
