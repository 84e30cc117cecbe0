// What an attachment does in one way without a GPU and in another with one: how submissions reach the ring, and who
// takes completions from it. An attachment has one from the start, and may be given another one before its first step.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_MEMORY_PLANE_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_MEMORY_PLANE_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "client/src/core/gradient_mover.h"
#include "client/src/core/step_progress.h"
#include "client/src/core/step_rings.h"
#include "client/src/status.h"

namespace superoffload::client {

class GpuPlane;
class ModelLayout;
class StepPlane;

// FAILED_PRECONDITION: the attachment has no GPU.
Status NoGpu();

// Submitting and waiting may be done by one thread each.
class MemoryPlane {
 public:
  using Condition = std::function<bool(const StepProgress&)>;

  virtual ~MemoryPlane() = default;

  // After those before it.
  virtual Status Submit(const superoffload_ring_entry& entry) = 0;

  // Until `done` holds of what the completions have told. An error is the daemon's answer, or as
  // StepRings::WaitCompletion.
  virtual Status WaitUntil(const Deadline& deadline, const Condition& done) = 0;

  // The trainer goes on while the tail of its last step is under way: the next one begins when that is over.
  virtual bool runs_ahead() const = 0;

  // What brings the attachment's gradients; `layout` and `steps` outlive it. `threads`: that a copy may use.
  virtual std::unique_ptr<GradientMover> MakeGradientMover(const ModelLayout* layout, StepPlane* steps,
                                                           size_t threads) = 0;

  // The parameters in a bucket are published, of the step that was ended last, and `stream` waits for them.
  // FAILED_PRECONDITION: they are on no GPU.
  virtual Status WaitOnStream(uint32_t bucket, StreamNumber stream, const Deadline& deadline);
  // For how long that has waited since the step was ended.
  virtual double stall_seconds() const { return 0; }

  // The plane is the host's afterwards.
  virtual void End() {}

  // Null: this is the host's.
  virtual GpuPlane* gpu() { return nullptr; }
};

// Submits at once; whoever waits takes the completions.
class HostPlane final : public MemoryPlane {
 public:
  // Both outlive it.
  HostPlane(StepRings* rings, StepProgress* progress) : rings_(*rings), progress_(*progress) {}

  Status Submit(const superoffload_ring_entry& entry) override { return rings_.WaitSubmit(entry); }
  Status WaitUntil(const Deadline& deadline, const Condition& done) override;
  bool runs_ahead() const override { return false; }
  std::unique_ptr<GradientMover> MakeGradientMover(const ModelLayout* layout, StepPlane* steps,
                                                   size_t threads) override;

 private:
  StepRings& rings_;
  StepProgress& progress_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_MEMORY_PLANE_H_
