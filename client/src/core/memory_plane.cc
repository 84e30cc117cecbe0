#include "client/src/core/memory_plane.h"

#include "client/src/core/host_gradients.h"

namespace superoffload::client {

Status NoGpu() {
  return Error(Code::kFailedPrecondition, "the attachment has no GPU; call superoffload_gpu_attach first");
}

Status MemoryPlane::WaitOnStream(uint32_t, StreamNumber, const Deadline&) { return NoGpu(); }

Status HostPlane::WaitUntil(const Deadline& deadline, const Condition& done) {
  while (!done(progress_)) {
    superoffload_ring_entry entry;
    if (Status status = rings_.WaitCompletion(deadline, &entry); !status.ok()) return status;
    if (entry.opcode == SUPEROFFLOAD_COMPLETE_ERROR) return rings_.ErrorOf(entry);
    progress_.Take(entry);
  }
  return {};
}

std::unique_ptr<GradientMover> HostPlane::MakeGradientMover(const ModelLayout* layout, StepPlane* steps,
                                                            size_t threads) {
  return std::make_unique<HostGradients>(layout, steps, threads);
}

}  // namespace superoffload::client
