#include "server/transport/transport.h"

#include <chrono>
#include <string>
#include <utility>

#include "kernels/base/check.h"
#include "server/memory/thread.h"

namespace superoffload::transport {

Transport::Transport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                     std::function<void(const absl::Status&)> on_end)
    : CompletionEntries(attachment_epoch), ring_(std::move(ring)), handler_(handler), on_end_(std::move(on_end)) {}

Transport::~Transport() {
  if (thread_.joinable()) thread_.join();
}

absl::Status Transport::Start() {
  absl::StatusOr<std::thread> thread = memory::StartThread("so-attachment", [this] { Run(); });
  if (!thread.ok()) return thread.status();
  thread_ = *std::move(thread);
  return absl::OkStatus();
}

void Transport::RequestEnd(const absl::Status& reason) {
  SetEndReason(reason);
  // The thread may be between its look at stop_ and its sleep, and the futex word is the trainer's to change: wake
  // until heard.
  while (thread_.joinable() && !exited_.load(std::memory_order_acquire)) {
    ring_.Wake();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Transport::SetEndReason(const absl::Status& reason) {
  absl::MutexLock lock(&end_mu_);
  if (stop_.load(std::memory_order_relaxed)) return;
  end_reason_ = reason;
  stop_.store(true, std::memory_order_release);
}

void Transport::Run() {
  while (true) {
    absl::StatusOr<superoffload_ring_entry> entry = ring_.WaitPop(stop_);
    if (!entry.ok()) {
      SetEndReason(entry.status());
      break;
    }
    Submit(*entry);
  }
  EndMover(Phase::kEnded);
  exited_.store(true, std::memory_order_release);
  const absl::Status reason = end_reason();
  ring_.SetErrorText(std::string(reason.message()));
  ring_.Close();
  on_end_(reason);
}

void Transport::Submit(const superoffload_ring_entry& entry) {
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_UNMAP_DEVICE) {
    if (absl::Status status = Unmap(entry); !status.ok()) Reject(entry, status);
  } else if (DeviceMover* const mover = this->mover(); mover != nullptr) {
    mover->Submit(entry);
  } else if (absl::Status status = Deliver(entry, std::nullopt); !status.ok()) {
    Reject(entry, status);
  }
}

absl::Status Transport::Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) {
  return DeliverEntry(entry, attachment_epoch(), sum_of_squares, *handler_);
}

void Transport::GradientTaken(uint64_t step, uint32_t slot) {
  Push(Completion(SUPEROFFLOAD_COMPLETE_GRADIENT_TAKEN, slot, step));
}

void Transport::Landed(uint64_t step, uint32_t bucket) { Push(Completion(SUPEROFFLOAD_COMPLETE_LANDED, bucket, step)); }

void Transport::Reject(const superoffload_ring_entry& entry, const absl::Status& status) {
  ring_.SetErrorText(std::string(status.message()));
  Push(Completion(SUPEROFFLOAD_COMPLETE_ERROR, static_cast<uint32_t>(status.code()), entry.step));
}

void Transport::Push(const superoffload_ring_entry& entry) {
  absl::Status status;
  {
    absl::MutexLock lock(&push_mu_);
    status = ring_.Push(entry);
  }
  if (!status.ok()) Fail(status);
}

void Transport::Fail(const absl::Status& status) {
  SetEndReason(status);
  ring_.Wake();  // once: the caller may hold the engine's lock
}

absl::Status Transport::end_reason() const {
  absl::MutexLock lock(&end_mu_);
  return end_reason_;
}

absl::Status Transport::MapDevice(const superoffload_device_request& request, std::span<const int> descriptors,
                                  MovedMemory memory) {
  {
    absl::MutexLock lock(&mover_mu_);
    if (phase_ == Phase::kMapping || phase_ == Phase::kMapped) {
      return absl::FailedPreconditionError("the attachment has mapped GPU memory already; attach anew");
    }
    if (phase_ == Phase::kEnded) return absl::FailedPreconditionError("the attachment has ended; attach anew");
    phase_ = Phase::kMapping;
  }
  // Takes long, and the engine must not wait for it.
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = DeviceMover::Open(request, descriptors, std::move(memory), this);
  absl::MutexLock lock(&mover_mu_);
  if (phase_ == Phase::kEnded) return absl::FailedPreconditionError("the attachment has ended; attach anew");
  SUPEROFFLOAD_CHECK_EQ(phase_, Phase::kMapping);
  phase_ = mover.ok() ? Phase::kMapped : Phase::kHostOnly;
  if (mover.ok()) mover_ = *std::move(mover);
  return mover.status();
}

DeviceMover* Transport::mover() {
  absl::MutexLock lock(&mover_mu_);
  return mover_.get();
}

absl::Status Transport::Unmap(const superoffload_ring_entry& entry) {
  if (absl::Status status = CheckEpoch(entry, attachment_epoch()); !status.ok()) return status;
  DeviceMover* const mover = this->mover();
  if (mover == nullptr) return absl::FailedPreconditionError("UNMAP_DEVICE, but no GPU memory is mapped");
  if (absl::Status status = mover->CheckNoOpenStep("UNMAP_DEVICE"); !status.ok()) return status;
  EndMover(Phase::kHostOnly);
  return absl::OkStatus();
}

void Transport::EndMover(Phase next) {
  std::unique_ptr<DeviceMover> mover;
  {
    absl::MutexLock lock(&mover_mu_);
    SUPEROFFLOAD_CHECK(phase_ != Phase::kEnded);
    phase_ = next;
    mover = std::move(mover_);
  }
  mover.reset();  // what it has issued is done before anybody else touches the memory
}

void Transport::ParametersReady(uint64_t step, uint32_t bucket, bool speculative) {
  CompletionEntries::ParametersReady(step, bucket, speculative);
  absl::MutexLock lock(&mover_mu_);
  if (mover_ != nullptr) mover_->Published(step, bucket, speculative);
}

void Transport::VerdictReached(const engine::VerdictReport& report) {
  CompletionEntries::VerdictReached(report);
  absl::MutexLock lock(&mover_mu_);
  if (mover_ != nullptr) mover_->VerdictReached(report.step, !IsSkip(report.verdict), report.speculation_stands);
}

}  // namespace superoffload::transport
