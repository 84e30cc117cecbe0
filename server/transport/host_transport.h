// The transport of one attachment: a thread that carries submissions from the ring to the engine, and a sink that
// carries completions back. The tensors themselves lie in memory that trainer and daemon both map; when that is GPU
// memory, too, a mover copies between it and the host's.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/transport/device_mover.h"
#include "server/transport/ring_memory.h"
#include "server/transport/transport.h"

namespace superoffload::transport {

class HostTransport final : public CompletionSink, private MoverPeer {
 public:
  // `on_end(status)` is called once by the transport's thread, as its last act, when RequestEnd was called or the
  // trainer broke the rings; the status says why.
  HostTransport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                std::function<void(const absl::Status&)> on_end);

  // Joins the thread; RequestEnd must have been called, or Start not. Not from on_end.
  ~HostTransport() override;

  // After the engine was given this sink.
  // RESOURCE_EXHAUSTED: no thread for it.
  absl::Status Start();

  // The first reason counts. Returns once the thread has noticed, which never takes longer than one submission. Any
  // thread but its own.
  void RequestEnd(const absl::Status& reason);

  // From now on submissions may name device slots, and each step that commits has its parameters copied to the trainer's
  // GPU memory. See
  // DeviceMover::Open. FAILED_PRECONDITION: it has some already, or the attachment is ending.
  absl::Status MapDevice(const superoffload_device_request& request, int descriptor, MovedMemory memory);

  const memory::SharedMemory& ring_memory() const { return ring_.memory(); }

  void SlotFree(uint64_t step, uint32_t bucket) override;
  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void NormMeasured(uint64_t step, double global_norm) override;
  void VerdictReached(const VerdictReport& report) override;

 private:
  void Run();
  void SetEndReason(const absl::Status& reason);
  absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) override;
  void Reject(const superoffload_ring_entry& entry, const absl::Status& status) override;
  void GradientTaken(uint64_t step, uint32_t slot) override;
  void Landed(uint64_t step, uint32_t bucket) override;
  void Fail(const absl::Status& status) override;
  DeviceMover* mover();
  superoffload_ring_entry Completion(superoffload_completion opcode, uint32_t index, uint64_t step,
                                     int flags = 0) const;
  void Push(superoffload_ring_entry entry);
  absl::Status end_reason() const;

  RingMemory ring_;
  const uint64_t attachment_epoch_;
  StepHandler* const handler_;
  const std::function<void(const absl::Status&)> on_end_;
  std::atomic<bool> stop_{false};  // released by RequestEnd, acquired by the thread
  std::atomic<bool> exited_{false};
  absl::Mutex push_mu_;  // engine and transport threads both produce
  mutable absl::Mutex end_mu_;
  absl::Status end_reason_ ABSL_GUARDED_BY(end_mu_);
  absl::Mutex mover_mu_;
  bool maps_ ABSL_GUARDED_BY(mover_mu_) = false;  // has GPU memory, or tried to
  bool ended_ ABSL_GUARDED_BY(mover_mu_) = false;
  std::unique_ptr<DeviceMover> mover_ ABSL_GUARDED_BY(mover_mu_);  // taken away by the transport's thread only
  std::thread thread_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_
