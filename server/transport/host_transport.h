// The host transport of one attachment: a thread that carries submissions from the ring to the engine, and a sink that
// carries completions back. The tensors themselves lie in memory that trainer and daemon both map.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/transport/ring_memory.h"
#include "server/transport/transport.h"

namespace superoffload::transport {

class HostTransport final : public CompletionSink {
 public:
  // `on_end(status)` is called once by the transport's thread, as its last act, when RequestEnd was called or the
  // trainer broke the rings; the status says why.
  HostTransport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                std::function<void(const absl::Status&)> on_end);

  // Joins the thread; RequestEnd must have been called, or Start not. Not from on_end.
  ~HostTransport() override;

  // After the engine was given this sink.
  void Start();

  // The first reason counts. Returns once the thread has noticed, which never takes longer than one submission. Any
  // thread but its own.
  void RequestEnd(const absl::Status& reason);

  const memory::SharedMemory& ring_memory() const { return ring_.memory(); }

  void SlotFree(uint64_t step, uint32_t bucket) override;
  void ParametersReady(uint64_t step, uint32_t bucket, bool speculative) override;
  void NormMeasured(uint64_t step, double global_norm) override;
  void VerdictReached(const VerdictReport& report) override;

 private:
  void Run();
  void SetEndReason(const absl::Status& reason);
  absl::Status Dispatch(const superoffload_ring_entry& entry);
  void PushError(const absl::Status& status, uint64_t step);
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
  std::thread thread_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_
