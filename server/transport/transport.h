// The transport of one attachment: a thread that carries submissions from the ring to the engine, and a sink that
// carries completions back. Tensors lie in host memory that trainer and daemon both map. Once the trainer has mapped
// GPU memory, a mover stands between the rings and the engine: submissions pass through it on their way in, and it
// hears of completions on their way out.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_TRANSPORT_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/step_contract.h"
#include "server/transport/device_mover.h"
#include "server/transport/ring_memory.h"
#include "server/transport/rings.h"
#include "server/transport/step_entries.h"

namespace superoffload::transport {

using engine::StepHandler;

class Transport final : public CompletionEntries, private Rings {
 public:
  // `on_end(status)` is called once by the transport's thread, as its last act, when RequestEnd was called or the
  // trainer broke the rings; the status says why.
  Transport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
            std::function<void(const absl::Status&)> on_end);

  // Joins the thread; RequestEnd must have been called, or Start not. Not from on_end.
  ~Transport() override;

  // After the engine was given this sink.
  // RESOURCE_EXHAUSTED: no thread for it.
  absl::Status Start();

  // The first reason counts. Returns once the thread has noticed, which never takes longer than one submission. Any
  // thread but its own.
  void RequestEnd(const absl::Status& reason);

  const memory::SharedMemory& ring_memory() const { return ring_.memory(); }

  // From now on submissions may name device slots, and each step that commits has its parameters copied to the
  // trainer's GPU memory. See DeviceMover::Open. FAILED_PRECONDITION: it has some already, or the attachment is ending.
  absl::Status MapDevice(const superoffload_device_request& request, std::span<const int> descriptors,
                         MovedMemory memory);

  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void VerdictReached(const engine::VerdictReport& report) override;

 private:
  enum class Phase { kHostOnly, kMapping, kMapped, kEnded };

  absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) override;
  void Reject(const superoffload_ring_entry& entry, const absl::Status& status) override;
  void GradientTaken(uint64_t step, uint32_t slot) override;
  void Landed(uint64_t step, uint32_t bucket) override;
  void Fail(const absl::Status& status) override;

  void Run();
  void Submit(const superoffload_ring_entry& entry);
  void SetEndReason(const absl::Status& reason);
  void Push(const superoffload_ring_entry& entry) override;
  absl::Status end_reason() const;

  absl::Status Unmap(const superoffload_ring_entry& entry);
  void EndMover(Phase next);
  DeviceMover* mover();

  RingMemory ring_;
  StepHandler* const handler_;
  const std::function<void(const absl::Status&)> on_end_;
  std::atomic<bool> stop_{false};  // released by RequestEnd, acquired by the thread
  std::atomic<bool> exited_{false};
  absl::Mutex push_mu_;  // engine and transport threads both produce
  mutable absl::Mutex end_mu_;
  absl::Status end_reason_ ABSL_GUARDED_BY(end_mu_);
  absl::Mutex mover_mu_;
  Phase phase_ ABSL_GUARDED_BY(mover_mu_) = Phase::kHostOnly;
  std::unique_ptr<DeviceMover> mover_ ABSL_GUARDED_BY(mover_mu_);  // taken away by the transport's thread only
  std::thread thread_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_TRANSPORT_H_
