// The transport of one attachment: a thread that carries submissions from the ring to the engine, and a sink that
// carries completions back. It knows rings only: the tensors lie in host memory that trainer and daemon both map. For
// GPU memory, device_transport.h stands above it and takes the submissions first.
#ifndef SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_
#define SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/transport/ring_memory.h"
#include "server/engine/step_contract.h"
#include "server/transport/rings.h"
#include "server/transport/step_entries.h"

namespace superoffload::transport {

using engine::StepHandler;

class HostTransport final : public CompletionEntries, public Rings {
 public:
  // `on_end(status)` is called once by the transport's thread, as its last act, when RequestEnd was called or the
  // trainer broke the rings; the status says why. `submissions` takes the entries and delivers them; null: they are
  // delivered as they come.
  HostTransport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                std::function<void(const absl::Status&)> on_end, SubmissionSink* submissions = nullptr);

  // Joins the thread; RequestEnd must have been called, or Start not. Not from on_end.
  ~HostTransport() override;

  // After the engine was given this sink.
  // RESOURCE_EXHAUSTED: no thread for it.
  absl::Status Start();

  // The first reason counts. Returns once the thread has noticed, which never takes longer than one submission. Any
  // thread but its own.
  void RequestEnd(const absl::Status& reason);

  const memory::SharedMemory& ring_memory() const { return ring_.memory(); }

  absl::Status Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) override;
  void Reject(const superoffload_ring_entry& entry, const absl::Status& status) override;
  void GradientTaken(uint64_t step, uint32_t slot) override;
  void Landed(uint64_t step, uint32_t bucket) override;
  void Fail(const absl::Status& status) override;

 private:
  void Run();
  void Submit(const superoffload_ring_entry& entry);
  void SetEndReason(const absl::Status& reason);
  void Push(const superoffload_ring_entry& entry) override;
  absl::Status end_reason() const;

  RingMemory ring_;
  StepHandler* const handler_;
  const std::function<void(const absl::Status&)> on_end_;
  SubmissionSink* const submissions_;
  std::atomic<bool> stop_{false};  // released by RequestEnd, acquired by the thread
  std::atomic<bool> exited_{false};
  absl::Mutex push_mu_;  // engine and transport threads both produce
  mutable absl::Mutex end_mu_;
  absl::Status end_reason_ ABSL_GUARDED_BY(end_mu_);
  std::thread thread_;
};

}  // namespace superoffload::transport

#endif  // SUPEROFFLOAD_SERVER_TRANSPORT_HOST_TRANSPORT_H_
