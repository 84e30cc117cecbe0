#include "server/transport/device_mover.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace superoffload::transport {
namespace {

using kernels::CudaStatus;
using kernels::CurrentDevice;

absl::Status ToAbsl(const CudaStatus& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.code), status.message);
}

bool InDeviceSlot(const superoffload_ring_entry& entry) {
  return entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE || (entry.flags & SUPEROFFLOAD_FLAG_DEVICE_SLOT) != 0;
}

bool Contains(uint64_t bytes, uint64_t offset, uint64_t size) { return offset <= bytes && size <= bytes - offset; }

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMover>> DeviceMover::Open(const superoffload_device_request& request,
                                                               std::span<const int> descriptors, MovedMemory memory,
                                                               Rings* rings) {
  kernels::CudaUuid uuid;
  std::memcpy(uuid.bytes, request.device_uuid, sizeof(uuid.bytes));
  std::shared_ptr<const kernels::GpuDevice> device;
  if (CudaStatus status = kernels::GpuDevice::OpenByUuid(uuid, &device); !status.ok()) return ToAbsl(status);
  std::unique_ptr<DeviceMover> mover(new DeviceMover(request, std::move(memory), rings, std::move(device)));
  if (absl::Status status = mover->CheckRequest(); !status.ok()) return status;
  if (absl::Status status = mover->Map(descriptors); !status.ok()) return status;
  return mover;
}

absl::StatusOr<std::unique_ptr<DeviceMover>> DeviceMover::OpenMapped(const superoffload_device_request& request,
                                                                     std::shared_ptr<const kernels::GpuDevice> device,
                                                                     kernels::CudaPointer gpu, MovedMemory memory,
                                                                     Rings* rings, kernels::MakeQueue make_queue) {
  std::unique_ptr<DeviceMover> mover(new DeviceMover(request, std::move(memory), rings, std::move(device)));
  if (absl::Status status = mover->CheckRequest(); !status.ok()) return status;
  const CurrentDevice current(*mover->device_);
  if (absl::Status status = mover->OpenMover(gpu, std::move(make_queue)); !status.ok()) return status;
  return mover;
}

absl::Status DeviceMover::Map(std::span<const int> descriptors) {
  const CurrentDevice current(*device_);
  if (CudaStatus status = kernels::SharedGpuMemory::Import(device_, request_.memory_bytes, request_.piece_bytes,
                                                           descriptors, &gpu_memory_);
      !status.ok()) {
    return ToAbsl(status);
  }
  return OpenMover(gpu_memory_->data(), /*make_queue=*/{});
}

// The device is current.
absl::Status DeviceMover::OpenMover(kernels::CudaPointer gpu, kernels::MakeQueue make_queue) {
  const auto landed = [this](uint64_t step, uint32_t bucket, const CudaStatus& status) {
    status.ok() ? rings_->Landed(step, bucket) : rings_->Fail(ToAbsl(status));
  };
  if (CudaStatus status = kernels::Mover::Open(
          device_, gpu,
          {.gradients = memory_.gradients,
           .parameters = memory_.parameters,
           .buckets = memory_.buckets,
           .slots = {.count = request_.slots,
                     .offset = request_.slots_offset,
                     .bytes = request_.slot_bytes,
                     .sums_offset = request_.sums_offset,
                     .sums_bytes = request_.sums_bytes}},
          {.process = "the daemon", .upload_thread = true, .landed = landed, .make_queue = std::move(make_queue)},
          &mover_);
      !status.ok()) {
    return ToAbsl(status);
  }
  // Copies that wait in the driver would hold up everything behind them.
  return mover_->staged() ? ToAbsl(mover_->unregistered().front()) : absl::OkStatus();
}

absl::Status DeviceMover::CheckRequest() const {
  const superoffload_device_request& r = request_;
  if (r.slots < 1 || r.slots > SUPEROFFLOAD_MAX_DEVICE_SLOTS) {
    return absl::InvalidArgumentError(
        absl::StrCat(r.slots, " device slots, but there must be 1 to ", SUPEROFFLOAD_MAX_DEVICE_SLOTS));
  }
  uint64_t gradient_bytes = 0, chunks = 0;
  for (const kernels::MovedBucket& bucket : memory_.buckets) {
    gradient_bytes = std::max(gradient_bytes, bucket.gradient_bytes);
    chunks = std::max(chunks, bucket.chunks);
  }
  constexpr uint64_t kMostBytes = uint64_t{1} << 60;  // so that no product below overflows
  if (r.memory_bytes > kMostBytes || r.slot_bytes < gradient_bytes || r.sums_bytes < chunks * sizeof(double) ||
      r.slot_bytes > r.memory_bytes || r.sums_bytes > r.memory_bytes ||
      !Contains(r.memory_bytes, r.slots_offset, r.slots * r.slot_bytes) ||
      !Contains(r.memory_bytes, r.sums_offset, r.slots * r.sums_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the trainer's GPU memory of ", r.memory_bytes, " bytes does not hold ", r.slots,
                     " gradient slots of ", gradient_bytes, " bytes; use a client library of this daemon's version"));
  }
  return absl::OkStatus();
}

DeviceMover::~DeviceMover() {
  if (mover_ != nullptr) mover_->arrivals().WaitEmpty();  // callbacks use mover_, which reset() clears first
  mover_.reset();
  const CurrentDevice current(*device_);
  gpu_memory_.reset();
}

void DeviceMover::Submit(const superoffload_ring_entry& entry) {
  switch (entry.opcode) {
    case SUPEROFFLOAD_SUBMIT_BEGIN_STEP:
      Begin(entry);
      return;
    case SUPEROFFLOAD_SUBMIT_END_STEP:
    case SUPEROFFLOAD_SUBMIT_ABANDON_STEP:
      open_step_ = 0;
      break;
    case SUPEROFFLOAD_SUBMIT_GRADIENT_READY:
    case SUPEROFFLOAD_SUBMIT_PROBE:
      if (absl::Status status = TakeGradient(entry); !status.ok()) return RejectGradient(entry, status);
      if (InDeviceSlot(entry)) return;
      break;
    default:
      break;
  }
  mover_->arrivals().Then([this, entry](const CudaStatus&) { Deliver(entry, std::nullopt); });
}

void DeviceMover::RejectGradient(const superoffload_ring_entry& entry, const absl::Status& status) {
  mover_->arrivals().Then([this, entry, status](const CudaStatus&) {
    rings_->Reject(entry, status);
    const uint32_t slot = entry.payload.gradient.slot;
    // Or the trainer would wait for it.
    if (InDeviceSlot(entry) && slot < request_.slots) rings_->GradientTaken(entry.step, slot);
  });
}

// Waits for what came before: a gradient is copied as soon as it is announced, which must not happen before the engine
// has agreed to the step.
void DeviceMover::Begin(const superoffload_ring_entry& entry) {
  mover_->arrivals().WaitEmpty();
  if (absl::Status status = rings_->Deliver(entry, std::nullopt); !status.ok()) {
    rings_->Reject(entry, status);
    return;
  }
  open_step_ = entry.step;
  committed_steps_ = memory_.committed_steps();
  submitted_.assign(submitted_.size(), false);
}

absl::Status DeviceMover::CheckNoOpenStep(absl::string_view request) const {
  if (open_step_ == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(request, " while step ", open_step_, " is open; end it first"));
}

absl::Status DeviceMover::TakeGradient(const superoffload_ring_entry& entry) {
  if (absl::Status status = SetWayBack(entry); !status.ok()) return status;
  return InDeviceSlot(entry) ? CopyGradient(entry) : absl::OkStatus();
}

// Whether, and to where, the bucket's parameters are copied.
absl::Status DeviceMover::SetWayBack(const superoffload_ring_entry& entry) {
  if (entry.index >= memory_.buckets.size()) return absl::OkStatus();  // it will be rejected
  const bool probe = entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE;
  const bool copies = probe || (entry.flags & SUPEROFFLOAD_FLAG_NO_COPY_BACK) == 0;
  if (copies) {
    const uint64_t offset = entry.payload.gradient.gpu_offset, bytes = memory_.buckets[entry.index].parameters_bytes;
    if (!Contains(request_.memory_bytes, offset, bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the ", bytes, " bytes of parameters of bucket ", entry.index, " do not lie at byte ", offset,
                       " of GPU memory of ", request_.memory_bytes, "; use a client library of this daemon's version"));
    }
    mover_->SetGpuOffset(entry.index, offset);
  }
  if (!probe) mover_->SetCopiesUp(entry.index, copies);
  return absl::OkStatus();
}

absl::Status DeviceMover::CheckGradient(const superoffload_ring_entry& entry) const {
  if (entry.index >= memory_.buckets.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bucket ", entry.index, " does not exist; the plan has ", memory_.buckets.size(), " buckets"));
  }
  if (entry.payload.gradient.slot >= request_.slots) {
    return absl::InvalidArgumentError(
        absl::StrCat("device slot ", entry.payload.gradient.slot, " does not exist; there are ", request_.slots));
  }
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE) {
    return CheckNoOpenStep("PROBE");
  }
  if ((entry.flags & SUPEROFFLOAD_FLAG_LOGGED) != 0 && memory_.buckets[entry.index].log_slots == 0) {
    return absl::InvalidArgumentError(absl::StrCat("bucket ", entry.index,
                                                   " was submitted into its log, but has none; create the optimizer "
                                                   "with logs"));
  }
  if (entry.step != open_step_) {
    return absl::FailedPreconditionError(
        absl::StrCat("GRADIENT_READY of step ", entry.step, " without an open step; begin it first"));
  }
  if (submitted_[entry.index]) {
    return absl::AlreadyExistsError(absl::StrCat("bucket ", entry.index, " was already submitted in step ", entry.step,
                                                 "; submit each bucket once per step"));
  }
  return absl::OkStatus();
}

// A probe goes where no step fills yet.
uint32_t DeviceMover::HostSlotOf(const superoffload_ring_entry& entry) const {
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE) return static_cast<uint32_t>(memory_.committed_steps() % 2);
  const bool logged = (entry.flags & SUPEROFFLOAD_FLAG_LOGGED) != 0;
  return static_cast<uint32_t>(committed_steps_ % (logged ? memory_.buckets[entry.index].log_slots : 2));
}

absl::Status DeviceMover::CopyGradient(const superoffload_ring_entry& entry) {
  if (absl::Status status = CheckGradient(entry); !status.ok()) return status;
  const bool probe = entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE;
  if (!probe) submitted_[entry.index] = true;
  const CurrentDevice current(*device_);
  const CudaStatus status = mover_->CopyDown(
      entry.index, entry.payload.gradient.slot, HostSlotOf(entry), kernels::Mover::What::kGradientAndSums,
      [this, entry](const CudaStatus& done, double sum_of_squares) { OnGradient(entry, done, sum_of_squares); });
  if (!status.ok()) rings_->Fail(ToAbsl(status));
  return absl::OkStatus();
}

void DeviceMover::OnGradient(const superoffload_ring_entry& entry, const CudaStatus& status, double sum_of_squares) {
  if (!status.ok()) {
    rings_->Fail(ToAbsl(status));
    return;
  }
  rings_->GradientTaken(entry.step, entry.payload.gradient.slot);
  if (entry.opcode != SUPEROFFLOAD_SUBMIT_PROBE) {
    Deliver(entry, sum_of_squares);
  } else if (CudaStatus copied = mover_->CopyUp(entry.step, entry.index); !copied.ok()) {
    rings_->Fail(ToAbsl(copied));
  }
}

void DeviceMover::Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) {
  if (absl::Status status = rings_->Deliver(entry, sum_of_squares); !status.ok()) rings_->Reject(entry, status);
}

// The mover's thread issues the copies: neither call can fail.
void DeviceMover::Published(uint64_t step, uint32_t bucket, bool speculative) {
  (void)mover_->Published(step, bucket, speculative);
}

void DeviceMover::VerdictReached(uint64_t step, bool commits, bool speculation_stands) {
  (void)mover_->VerdictReached(step, commits, speculation_stands);
}

}  // namespace superoffload::transport
