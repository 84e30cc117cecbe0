// A transport whose trainer may use a GPU: the rings, and above them a mover once the trainer's GPU memory is mapped.
// Submissions pass through the mover on their way in, completions on their way out.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_TRANSPORT_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/step_contract.h"
#include "server/transport/device_mover.h"
#include "server/transport/host_transport.h"
#include "server/transport/rings.h"

namespace superoffload::transport {

using engine::CompletionSink;
using engine::VerdictReport;

class DeviceTransport final : public CompletionSink, private SubmissionSink {
 public:
  // As HostTransport.
  DeviceTransport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                  std::function<void(const absl::Status&)> on_end)
      : rings_(std::move(ring), attachment_epoch, handler, std::move(on_end), this) {}
  absl::Status Start() { return rings_.Start(); }
  void RequestEnd(const absl::Status& reason) { rings_.RequestEnd(reason); }
  const memory::SharedMemory& ring_memory() const { return rings_.ring_memory(); }

  // From now on submissions may name device slots, and each step that commits has its parameters copied to the
  // trainer's GPU memory. See DeviceMover::Open. FAILED_PRECONDITION: it has some already, or the attachment is ending.
  absl::Status MapDevice(const superoffload_device_request& request, std::span<const int> descriptors,
                         MovedMemory memory);

  void SlotFree(uint64_t step, uint32_t bucket, uint32_t slot) override { rings_.SlotFree(step, bucket, slot); }
  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void NormMeasured(uint64_t step, double norm, double sum_of_squares) override {
    rings_.NormMeasured(step, norm, sum_of_squares);
  }
  void Prepared(uint64_t step, uint64_t attempt, double sum_of_squares) override {
    rings_.Prepared(step, attempt, sum_of_squares);
  }
  void VerdictReached(const VerdictReport& report) override;

 private:
  enum class Phase { kHostOnly, kMapping, kMapped, kEnded };

  void Submit(const superoffload_ring_entry& entry) override;
  void End() override;
  absl::Status Unmap(const superoffload_ring_entry& entry);
  void EndMover(Phase next);
  DeviceMover* mover();

  absl::Mutex mu_;
  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kHostOnly;
  std::unique_ptr<DeviceMover> mover_ ABSL_GUARDED_BY(mu_);  // taken away by the transport's thread only
  HostTransport rings_;                                      // the first to go: its thread uses the others
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_DEVICE_TRANSPORT_H_
