// What stands above the rings of an attachment and moves its tensors does this with them.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_RINGS_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_RINGS_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::transport {

// Any thread; Deliver by one at a time.
class Rings {
 public:
  virtual ~Rings() = default;
  // To the engine: a submission whose gradient, if it has one, has arrived. An error: it had no effect.
  virtual absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) = 0;
  // To the trainer.
  virtual void Reject(const superoffload_ring_entry& entry, const absl::Status& status) = 0;
  virtual void GradientTaken(uint64_t step, uint32_t slot) = 0;
  virtual void Landed(uint64_t step, uint32_t bucket) = 0;
  // Ends the attachment: nothing more will come.
  virtual void Fail(const absl::Status& status) = 0;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_RINGS_H_
