#include "server/transport/device_mover.h"

#include <pthread.h>

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

bool Contains(uint64_t bytes, uint64_t offset, uint64_t size) { return offset <= bytes && size <= bytes - offset; }

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMover>> DeviceMover::Open(const superoffload_device_request& request,
                                                               int descriptor, MovedMemory memory, MoverPeer* peer) {
  kernels::CudaUuid uuid;
  std::memcpy(uuid.bytes, request.device_uuid, sizeof(uuid.bytes));
  std::shared_ptr<const kernels::GpuDevice> device;
  if (CudaStatus status = kernels::GpuDevice::OpenByUuid(uuid, &device); !status.ok()) return ToAbsl(status);
  std::unique_ptr<DeviceMover> mover(new DeviceMover(request, std::move(memory), peer, device));
  if (absl::Status status = mover->CheckRequest(); !status.ok()) return status;
  const CurrentDevice current(*device);
  kernels::SharedGpuMemoryTicket ticket{.sharing = static_cast<kernels::Sharing>(request.sharing),
                                        .handle = {},
                                        .offset = request.memory_offset,
                                        .bytes = request.memory_bytes};
  std::memcpy(ticket.handle.bytes, request.memory_handle, sizeof(ticket.handle.bytes));
  if (CudaStatus status = kernels::SharedGpuMemory::Import(device, ticket, descriptor, &mover->gpu_memory_);
      !status.ok()) {
    return ToAbsl(status);
  }
  for (kernels::OwnedStream* stream : {&mover->down_, &mover->up_}) {
    if (CudaStatus status = kernels::MakeStream(*device, stream); !status.ok()) return ToAbsl(status);
  }
  if (CudaStatus status =
          kernels::PinnedMemory::Allocate(device, request.slots * mover->max_chunks_ * sizeof(double), &mover->sums_);
      !status.ok()) {
    return ToAbsl(status);
  }
  for (std::span<std::byte> host : {mover->memory_.gradients, mover->memory_.parameters}) {
    if (absl::Status status = mover->Register(host); !status.ok()) return status;
  }
  mover->arrivals_.emplace(device);
  mover->landings_.emplace(device);
  mover->uploading_ = std::thread([mover = mover.get()] { mover->RunUploads(); });
  pthread_setname_np(mover->uploading_.native_handle(), "so-uploads");
  return mover;
}

DeviceMover::DeviceMover(const superoffload_device_request& request, MovedMemory memory, MoverPeer* peer,
                         std::shared_ptr<const kernels::GpuDevice> device)
    : request_(request),
      memory_(std::move(memory)),
      peer_(peer),
      device_(std::move(device)),
      handed_over_(memory_.buckets.size()),
      copies_back_(memory_.buckets.size(), true) {
  for (const MovedBucket& bucket : memory_.buckets) max_chunks_ = std::max(max_chunks_, bucket.chunks);
}

absl::Status DeviceMover::CheckRequest() const {
  const superoffload_device_request& r = request_;
  if (r.slots < 1 || r.slots > SUPEROFFLOAD_MAX_DEVICE_SLOTS) {
    return absl::InvalidArgumentError(
        absl::StrCat(r.slots, " device slots, but there must be 1 to ", SUPEROFFLOAD_MAX_DEVICE_SLOTS));
  }
  uint64_t gradient_bytes = 0;
  for (const MovedBucket& bucket : memory_.buckets) gradient_bytes = std::max(gradient_bytes, bucket.gradient_bytes);
  constexpr uint64_t kMostBytes = uint64_t{1} << 60;  // so that no product below overflows
  if (r.memory_bytes > kMostBytes || r.slot_bytes < gradient_bytes || r.sums_bytes < max_chunks_ * sizeof(double) ||
      r.slot_bytes > r.memory_bytes || r.sums_bytes > r.memory_bytes ||
      !Contains(r.memory_bytes, 0, memory_.parameters.size()) ||
      !Contains(r.memory_bytes, r.slots_offset, r.slots * r.slot_bytes) ||
      !Contains(r.memory_bytes, r.sums_offset, r.slots * r.sums_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the trainer's GPU memory of ", r.memory_bytes, " bytes does not hold the optimizer's ",
                     memory_.parameters.size(), " bytes of parameters and ", r.slots, " gradient slots of ",
                     gradient_bytes, " bytes; use a client library of this daemon's version"));
  }
  return absl::OkStatus();
}

// Copies from and to memory that is not registered would wait in the driver, unless the GPU uses the host's page tables.
absl::Status DeviceMover::Register(std::span<std::byte> host) {
  if (host.empty()) return absl::OkStatus();
  const kernels::CudaDriver& driver = device_->driver();
  CudaStatus status =
      driver.Status(driver.MemHostRegister(host.data(), host.size(), kernels::kCudaHostRegisterPortable),
                    absl::StrCat("registering ", host.size(),
                                 " bytes of host memory (raise RLIMIT_MEMLOCK, LimitMEMLOCK=, of the daemon)"));
  if (status.ok()) registered_.push_back(host.data());
  return device_->Has(kernels::kCudaHostPageTables) ? absl::OkStatus() : ToAbsl(status);
}

DeviceMover::~DeviceMover() {
  const CurrentDevice current(*device_);
  arrivals_.reset();
  {
    absl::MutexLock lock(&up_mu_);
    ends_ = true;
  }
  if (uploading_.joinable()) uploading_.join();
  landings_.reset();
  const kernels::CudaDriver& driver = device_->driver();
  for (const kernels::OwnedStream* stream : {&down_, &up_}) {
    if (stream->get() != nullptr) driver.StreamSynchronize(stream->get());
  }
  for (std::byte* host : registered_) driver.MemHostUnregister(host);
  gpu_memory_.reset();
  down_ = {};
  up_ = {};
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
      NoteCopyBack(entry);
      if ((entry.flags & SUPEROFFLOAD_FLAG_DEVICE_SLOT) == 0) break;
      [[fallthrough]];
    case SUPEROFFLOAD_SUBMIT_PROBE:
      if (absl::Status status = CopyGradient(entry); !status.ok()) {
        arrivals_->Then([this, entry, status](const CudaStatus&) {
          peer_->Reject(entry, status);
          const uint32_t slot = entry.payload.gradient.slot;
          if (slot < request_.slots) peer_->GradientTaken(entry.step, slot);  // or the trainer would wait for it
        });
      }
      return;
    default:
      break;
  }
  arrivals_->Then([this, entry](const CudaStatus&) { Deliver(entry, std::nullopt); });
}

// Waits for what came before: a gradient is copied as soon as it is announced, which must not happen before the engine
// has agreed to the step.
void DeviceMover::Begin(const superoffload_ring_entry& entry) {
  arrivals_->WaitEmpty();
  if (absl::Status status = peer_->Deliver(entry, std::nullopt); !status.ok()) {
    peer_->Reject(entry, status);
    return;
  }
  open_step_ = entry.step;
  gradient_slot_ = memory_.next_slot();
  handed_over_.assign(handed_over_.size(), false);
}

void DeviceMover::NoteCopyBack(const superoffload_ring_entry& entry) {
  if (entry.index >= memory_.buckets.size()) return;  // will be rejected
  absl::MutexLock lock(&up_mu_);
  copies_back_[entry.index] = (entry.flags & SUPEROFFLOAD_FLAG_NO_COPY_BACK) == 0;
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
    if (open_step_ == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("PROBE while step ", open_step_, " is open; end it first"));
  }
  if (entry.step != open_step_) {
    return absl::FailedPreconditionError(
        absl::StrCat("GRADIENT_READY of step ", entry.step, " without an open step; begin it first"));
  }
  if (handed_over_[entry.index]) {
    return absl::AlreadyExistsError(absl::StrCat("bucket ", entry.index, " was already handed over in step ",
                                                 entry.step, "; hand each bucket over once per step"));
  }
  return absl::OkStatus();
}

absl::Status DeviceMover::CopyGradient(const superoffload_ring_entry& entry) {
  if (absl::Status status = CheckGradient(entry); !status.ok()) return status;
  const bool probe = entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE;
  if (!probe) handed_over_[entry.index] = true;
  const MovedBucket& bucket = memory_.buckets[entry.index];
  const uint64_t slot = entry.payload.gradient.slot;
  const uint32_t gradient_slot = probe ? memory_.next_slot() : gradient_slot_;
  const kernels::CudaDriver& driver = device_->driver();
  const kernels::CudaPointer base = gpu_memory_->data();
  const CurrentDevice current(*device_);
  CudaStatus status =
      driver.Status(driver.MemcpyDtoHAsync(memory_.gradients.data() + bucket.gradient_offsets[gradient_slot],
                                           base + request_.slots_offset + slot * request_.slot_bytes,
                                           bucket.gradient_bytes, down_.get()),
                    "copying a gradient from the GPU");
  if (status.ok()) {
    status =
        driver.Status(driver.MemcpyDtoHAsync(SumsOf(slot), base + request_.sums_offset + slot * request_.sums_bytes,
                                             bucket.chunks * sizeof(double), down_.get()),
                      "copying sums from the GPU");
  }
  if (status.ok()) {
    status = arrivals_->After(down_.get(), [this, entry](const CudaStatus& done) { OnGradient(entry, done); });
  }
  if (!status.ok()) peer_->Fail(ToAbsl(status));
  return absl::OkStatus();
}

void DeviceMover::OnGradient(const superoffload_ring_entry& entry, const CudaStatus& status) {
  if (!status.ok()) {
    peer_->Fail(ToAbsl(status));
    return;
  }
  const uint64_t slot = entry.payload.gradient.slot;
  const double* const sums = SumsOf(slot);
  double sum = 0;
  for (uint64_t chunk = 0; chunk < memory_.buckets[entry.index].chunks; ++chunk) sum += sums[chunk];
  peer_->GradientTaken(entry.step, static_cast<uint32_t>(slot));
  if (entry.opcode == SUPEROFFLOAD_SUBMIT_PROBE) {
    CopyParameters(entry.step, entry.index);
  } else {
    Deliver(entry, sum);
  }
}

void DeviceMover::Deliver(const superoffload_ring_entry& entry, std::optional<double> sum_of_squares) {
  if (absl::Status status = peer_->Deliver(entry, sum_of_squares); !status.ok()) peer_->Reject(entry, status);
}

void DeviceMover::Published(uint64_t step, uint32_t bucket, bool speculative) {
  absl::MutexLock lock(&up_mu_);
  uploads_.OnPublished(step, bucket, speculative);
}

void DeviceMover::VerdictReached(uint64_t step, bool commits, bool speculation_stands) {
  absl::MutexLock lock(&up_mu_);
  uploads_.OnVerdict(step, commits, speculation_stands);
}

void DeviceMover::RunUploads() {
  while (true) {
    uint64_t step = 0;
    uint32_t bucket = 0;
    {
      absl::MutexLock lock(&up_mu_);
      up_mu_.Await(absl::Condition(this, &DeviceMover::UploadsOrEnds));
      if (ends_) return;
      step = uploads_.step();
      bucket = *uploads_.Take();
      if (!copies_back_[bucket]) continue;
    }
    CopyParameters(step, bucket);
  }
}

void DeviceMover::CopyParameters(uint64_t step, uint32_t index) {
  const MovedBucket& bucket = memory_.buckets[index];
  const kernels::CudaDriver& driver = device_->driver();
  const CurrentDevice current(*device_);
  CudaStatus status = driver.Status(
      driver.MemcpyHtoDAsync(gpu_memory_->data() + bucket.parameters_offset,
                             memory_.parameters.data() + bucket.parameters_offset, bucket.parameters_bytes, up_.get()),
      "copying parameters to the GPU");
  if (status.ok()) {
    status = landings_->After(up_.get(), [this, step, index](const CudaStatus& done) {
      if (done.ok()) {
        peer_->Landed(step, index);
      } else {
        peer_->Fail(ToAbsl(done));
      }
    });
  }
  if (!status.ok()) peer_->Fail(ToAbsl(status));
}

}  // namespace superoffload::transport
