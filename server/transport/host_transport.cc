#include "server/transport/host_transport.h"

#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/memory/thread.h"

namespace superoffload::transport {

HostTransport::HostTransport(RingMemory ring, uint64_t attachment_epoch, StepHandler* handler,
                             std::function<void(const absl::Status&)> on_end)
    : ring_(std::move(ring)), attachment_epoch_(attachment_epoch), handler_(handler), on_end_(std::move(on_end)) {}

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
    if (DeviceMover* const mover = this->mover(); mover != nullptr) {
      mover->Submit(*entry);
    } else if (absl::Status status = Deliver(*entry, std::nullopt); !status.ok()) {
      Reject(*entry, status);
    }
  }
  std::unique_ptr<DeviceMover> mover;
  {
    absl::MutexLock lock(&mover_mu_);
    ended_ = true;
    mover = std::move(mover_);
  }
  mover.reset();  // what it has issued is done before anybody else touches the memory
  exited_.store(true, std::memory_order_release);
  const absl::Status reason = end_reason();
  ring_.SetErrorText(std::string(reason.message()));
  ring_.Close();
  on_end_(reason);
}

absl::Status HostTransport::MapDevice(const superoffload_device_request& request, int descriptor, MovedMemory memory) {
  {
    absl::MutexLock lock(&mover_mu_);
    if (maps_) return absl::FailedPreconditionError("the attachment has mapped GPU memory already; attach anew");
    maps_ = true;
  }
  // Takes long, and the engine must not wait for it.
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover = DeviceMover::Open(request, descriptor, std::move(memory), this);
  absl::MutexLock lock(&mover_mu_);
  if (!mover.ok()) {
    maps_ = false;
    return mover.status();
  }
  if (ended_) return absl::FailedPreconditionError("the attachment has ended; attach anew");
  mover_ = *std::move(mover);
  return absl::OkStatus();
}

DeviceMover* HostTransport::mover() {
  absl::MutexLock lock(&mover_mu_);
  return mover_.get();
}

absl::Status HostTransport::Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) {
  if (entry.attachment_epoch != attachment_epoch_) {
    return absl::FailedPreconditionError(absl::StrCat("an entry of attachment ", entry.attachment_epoch,
                                                      " on the ring of attachment ", attachment_epoch_,
                                                      "; attach again"));
  }
  const double* f64 = entry.payload.f64;
  switch (entry.opcode) {
    case SUPEROFFLOAD_SUBMIT_GROUP:
      return handler_->SetGroup(
          entry.index,
          GroupUpdate{.lr = f64[0], .beta1 = f64[1], .beta2 = f64[2], .eps = f64[3], .weight_decay = f64[4]});
    case SUPEROFFLOAD_SUBMIT_BEGIN_STEP:
      return handler_->BeginStep(entry.step, f64[0]);
    case SUPEROFFLOAD_SUBMIT_GRADIENT_READY:
      if ((entry.flags & SUPEROFFLOAD_FLAG_SUM_KNOWN) != 0) sum_of_squares = entry.payload.gradient.sum_of_squares;
      return handler_->GradientReady(entry.step, entry.index, sum_of_squares);
    case SUPEROFFLOAD_SUBMIT_END_STEP:
      return handler_->EndStep(entry.step, f64[0], f64[1]);
    case SUPEROFFLOAD_SUBMIT_ABANDON_STEP:
      return handler_->AbandonStep(entry.step);
    case SUPEROFFLOAD_SUBMIT_MEASURE_NORM:
      return handler_->MeasureNorm(entry.step, f64[0]);
    default:
      return absl::UnimplementedError(
          absl::StrCat("unknown submission opcode ", entry.opcode, "; use a client library of this daemon's version"));
  }
}

superoffload_ring_entry HostTransport::Completion(superoffload_completion opcode, uint32_t index, uint64_t step,
                                                  int flags) const {
  return {.opcode = static_cast<uint16_t>(opcode),
          .flags = static_cast<uint16_t>(flags),
          .index = index,
          .step = step,
          .attachment_epoch = attachment_epoch_,
          .payload = {}};
}

void HostTransport::SlotFree(uint64_t step, uint32_t bucket) {
  Push(Completion(SUPEROFFLOAD_COMPLETE_SLOT_FREE, bucket, step));
}

void HostTransport::ParametersReady(uint64_t step, uint32_t bucket, bool speculative) {
  Push(Completion(SUPEROFFLOAD_COMPLETE_PARAMETERS_READY, bucket, step,
                  speculative ? SUPEROFFLOAD_FLAG_SPECULATIVE : 0));
  absl::MutexLock lock(&mover_mu_);
  if (mover_ != nullptr) mover_->Published(step, bucket, speculative);
}

void HostTransport::NormMeasured(uint64_t step, double global_norm) {
  superoffload_ring_entry entry = Completion(SUPEROFFLOAD_COMPLETE_GRADIENT_NORM, 0, step);
  entry.payload.f64[0] = global_norm;
  Push(entry);
}

void HostTransport::VerdictReached(const VerdictReport& report) {
  superoffload_ring_entry entry =
      Completion(SUPEROFFLOAD_COMPLETE_VERDICT, static_cast<uint32_t>(report.verdict), report.step,
                 report.speculation_stands ? SUPEROFFLOAD_FLAG_SPECULATION_STANDS : 0);
  entry.payload.verdict = {.global_norm = report.global_norm,
                           .clip_coefficient = report.clip_coefficient,
                           .committed_steps = report.committed_steps,
                           .speculated_buckets = report.speculated_buckets,
                           .republished_buckets = report.republished_buckets,
                           .next_slot = report.next_slot,
                           .consecutive_skips = report.consecutive_skips};
  Push(entry);
  absl::MutexLock lock(&mover_mu_);
  if (mover_ != nullptr) mover_->VerdictReached(report.step, !IsSkip(report.verdict), report.speculation_stands);
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

void HostTransport::Push(superoffload_ring_entry entry) {
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
