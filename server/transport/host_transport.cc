#include "server/transport/host_transport.h"

#include <chrono>
#include <string>
#include <utility>

#include "server/memory/thread.h"

namespace superoffload::transport {

HostTransport::HostTransport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                             std::function<void(const absl::Status&)> on_end, SubmissionSink* submissions)
    : CompletionEntries(attachment_epoch),
      ring_(std::move(ring)),
      handler_(handler),
      on_end_(std::move(on_end)),
      submissions_(submissions) {}

HostTransport::~HostTransport() {
  if (thread_.joinable()) thread_.join();
}

absl::Status HostTransport::Start() {
  absl::StatusOr<std::thread> thread = memory::StartThread("so-attachment", [this] { Run(); });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

void HostTransport::RequestEnd(const absl::Status& reason) {
  SetEndReason(reason);
  // The thread may be between its look at stop_ and its sleep, and the futex word is the trainer's to change: wake
  // until heard.
  while (thread_.joinable() && !exited_.load(std::memory_order_acquire)) {
    ring_.Wake();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void HostTransport::SetEndReason(const absl::Status& reason) {
  absl::MutexLock lock(&end_mu_);
  if (stop_.load(std::memory_order_relaxed)) return;
  end_reason_ = reason;
  stop_.store(true, std::memory_order_release);
}

void HostTransport::Run() {
  while (true) {
    absl::StatusOr<superoffload_ring_entry> entry = ring_.WaitPop(stop_);
    if (!entry.ok()) {
      SetEndReason(entry.status());
      break;
    }
    Submit(*entry);
  }
  if (submissions_ != nullptr) submissions_->End();
  exited_.store(true, std::memory_order_release);
  const absl::Status reason = end_reason();
  ring_.SetErrorText(std::string(reason.message()));
  ring_.Close();
  on_end_(reason);
}

void HostTransport::Submit(const superoffload_ring_entry& entry) {
  if (submissions_ != nullptr) {
    submissions_->Submit(entry);
  } else if (absl::Status status = Deliver(entry, std::nullopt); !status.ok()) {
    Reject(entry, status);
  }
}

absl::Status HostTransport::Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) {
  return DeliverEntry(entry, attachment_epoch(), sum_of_squares, *handler_);
}

void HostTransport::GradientTaken(uint64_t step, uint32_t slot) {
  Push(Completion(SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN, slot, step));
}

void HostTransport::Landed(uint64_t step, uint32_t bucket) {
  Push(Completion(SUPEROFFLOAD_COMPLETE_LANDED, bucket, step));
}

void HostTransport::Reject(const superoffload_ring_entry& entry, const absl::Status& status) {
  ring_.SetErrorText(std::string(status.message()));
  Push(Completion(SUPEROFFLOAD_COMPLETE_ERROR, static_cast<uint32_t>(status.code()), entry.step));
}

void HostTransport::Push(const superoffload_ring_entry& entry) {
  absl::Status status;
  {
    absl::MutexLock lock(&push_mu_);
    status = ring_.Push(entry);
  }
  if (!status.ok()) Fail(status);
}

void HostTransport::Fail(const absl::Status& status) {
  SetEndReason(status);
  ring_.Wake();  // once: the caller may hold the engine's lock
}

absl::Status HostTransport::end_reason() const {
  absl::MutexLock lock(&end_mu_);
  return end_reason_;
}

}  // namespace superoffload::transport
