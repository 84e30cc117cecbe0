#include "server/transport/device_transport.h"

#include <optional>
#include <utility>

#include "kernels/check.h"

namespace superoffload::transport {

absl::Status DeviceTransport::MapDevice(const superoffload_device_request& request, std::span<const int> descriptors,
                                        MovedMemory memory) {
  {
    absl::MutexLock lock(&mu_);
    if (phase_ == Phase::kMapping || phase_ == Phase::kMapped) {
      return absl::FailedPreconditionError("the attachment has mapped GPU memory already; attach anew");
    }
    if (phase_ == Phase::kEnded) return absl::FailedPreconditionError("the attachment has ended; attach anew");
    phase_ = Phase::kMapping;
  }
  // Takes long, and the engine must not wait for it.
  absl::StatusOr<std::unique_ptr<DeviceMover>> mover =
      DeviceMover::Open(request, descriptors, std::move(memory), &rings_);
  absl::MutexLock lock(&mu_);
  if (phase_ == Phase::kEnded) return absl::FailedPreconditionError("the attachment has ended; attach anew");
  SUPEROFFLOAD_CHECK_EQ(phase_, Phase::kMapping);
  phase_ = mover.ok() ? Phase::kMapped : Phase::kHostOnly;
  if (mover.ok()) mover_ = *std::move(mover);
  return mover.status();
}

DeviceMover* DeviceTransport::mover() {
  absl::MutexLock lock(&mu_);
  return mover_.get();
}

void DeviceTransport::Submit(const superoffload_ring_entry& entry) {
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_UNMAP_DEVICE) {
    if (absl::Status status = Unmap(entry); !status.ok()) rings_.Reject(entry, status);
  } else if (DeviceMover* const mover = this->mover(); mover != nullptr) {
    mover->Submit(entry);
  } else if (absl::Status status = rings_.Deliver(entry, std::nullopt); !status.ok()) {
    rings_.Reject(entry, status);
  }
}

absl::Status DeviceTransport::Unmap(const superoffload_ring_entry& entry) {
  if (absl::Status status = CheckEpoch(entry, rings_.attachment_epoch()); !status.ok()) return status;
  DeviceMover* const mover = this->mover();
  if (mover == nullptr) return absl::FailedPreconditionError("UNMAP_DEVICE, but no GPU memory is mapped");
  if (absl::Status status = mover->CheckNoOpenStep("UNMAP_DEVICE"); !status.ok()) return status;
  EndMover(Phase::kHostOnly);
  return absl::OkStatus();
}

void DeviceTransport::End() { EndMover(Phase::kEnded); }

void DeviceTransport::EndMover(Phase next) {
  std::unique_ptr<DeviceMover> mover;
  {
    absl::MutexLock lock(&mu_);
    SUPEROFFLOAD_CHECK(phase_ != Phase::kEnded);
    phase_ = next;
    mover = std::move(mover_);
  }
  mover.reset();  // what it has issued is done before anybody else touches the memory
}

void DeviceTransport::ParametersReady(uint64_t step, uint32_t bucket, bool speculative) {
  rings_.ParametersReady(step, bucket, speculative);
  absl::MutexLock lock(&mu_);
  if (mover_ != nullptr) mover_->Published(step, bucket, speculative);
}

void DeviceTransport::VerdictReached(const VerdictReport& report) {
  rings_.VerdictReached(report);
  absl::MutexLock lock(&mu_);
  if (mover_ != nullptr) mover_->VerdictReached(report.step, !IsSkip(report.verdict), report.speculation_stands);
}

}  // namespace superoffload::transport
