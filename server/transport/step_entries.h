// What the entries of the step rings mean in terms of the step contract, whatever carries them.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_STEP_ENTRIES_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_STEP_ENTRIES_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "server/engine/step_contract.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::transport {

// FAILED_PRECONDITION: the entry is of another attachment.
absl::Status CheckEpoch(const superoffload_ring_entry& entry, uint64_t attachment_epoch);

// Calls `handler` with what `entry` submits. `sum_of_squares`: of the gradient, where somebody else than the trainer
// has computed it. An error: the entry is of another attachment, is unknown, or was rejected; it had no effect.
absl::Status DeliverEntry(const superoffload_ring_entry& entry, uint64_t attachment_epoch,
                          std::optional<double> sum_of_squares, engine::StepHandler& handler);

// Makes completions into entries. Push is called by any thread, by several at once if the sink's methods are.
class CompletionEntries : public engine::CompletionSink {
 public:
  explicit CompletionEntries(uint64_t attachment_epoch) : attachment_epoch_(attachment_epoch) {}

  uint64_t attachment_epoch() const { return attachment_epoch_; }

  void SlotFree(uint64_t step, uint32_t bucket, uint32_t slot) final;
  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void NormMeasured(uint64_t step, double norm, double sum_of_squares) final;
  void Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) final;
  void VerdictReached(const engine::VerdictReport& report) override;

 protected:
  superoffload_ring_entry Completion(superoffload_completion opcode, uint32_t index, uint64_t step,
                                     int flags = 0) const;
  virtual void Push(const superoffload_ring_entry& entry) = 0;

 private:
  const uint64_t attachment_epoch_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_STEP_ENTRIES_H_
