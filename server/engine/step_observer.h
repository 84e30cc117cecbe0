// What the engine tells those who watch it: metrics and step reports.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_STEP_OBSERVER_H_
#define SUPEROFFLOAD_SERVER_ENGINE_STEP_OBSERVER_H_

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "server/engine/step_contract.h"

namespace superoffload::engine {

// What a pass over one bucket does; see kernels/algorithm.h.
enum class PassKind : uint8_t {
  kNorm,            // sum of squares of the arrived gradient
  kSpeculate,       // absorb the pending gradient, publish the arrived one, before the verdict
  kUpdate,          // the same with the verdict applied
  kRepublish,       // publish again with the verdict applied; state is only read
  kPublishMasters,  // publish the masters as they are: the step was skipped, or they are pulled
  kAbsorb,          // absorb the pending gradient, publish nothing
  kTakeIn,          // absorb the pending gradient, publish the masters over it
  kPush,            // take the published parameters as masters
};
inline constexpr size_t kPassKinds = 8;
const char* PassName(PassKind kind);

struct PassReport {
  PassKind kind = PassKind::kNorm;
  uint64_t bytes = 0;  // read and written by the kernels, without write-allocate traffic
  absl::Duration duration;
};

struct StepReport {
  VerdictReport verdict = {};
  uint32_t buckets = 0;
  uint64_t gradient_bytes = 0;           // submitted
  uint64_t published_bytes = 0;          // of parameters, republished ones counted again
  uint64_t streamed_bytes = 0;           // of parameters, copied to a GPU's slots again
  absl::Duration receive_duration = {};  // BEGIN_STEP to END_STEP
  absl::Duration exposed_duration = {};  // END_STEP to the last final parameters
  absl::Time end_time = {};
  bool by_agreement = false;  // of a run's ranks, without a trainer: it has no durations
};

// Called with the engine's lock held: must not block and not call the engine.
class StepObserver {
 public:
  virtual ~StepObserver() = default;
  virtual void OnPass(const PassReport& report) = 0;
  virtual void OnStep(const StepReport& report) = 0;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_STEP_OBSERVER_H_
