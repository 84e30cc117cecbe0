// Invariants: a bucket is copied up once for each time that it becomes due, from host memory that nobody writes until
// the copy has landed: the bucket's next gradient is packed behind a wait for it. Every event is recorded anew only
// when nobody waits for it. A device slot that is copied down is used for nothing else until its callback has run; a
// trainer that breaks this gets a wrong sum of its own gradients.
#include "kernels/gpu/mover.h"

#include <algorithm>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/chunk_sums.h"
#include "kernels/gpu/completion_thread.h"

namespace superoffload::kernels {

CudaStatus Mover::Open(std::shared_ptr<const GpuDevice> device, CudaPointer gpu, MoverMemory memory, Options options,
                       std::unique_ptr<Mover>* mover) {
  std::unique_ptr<Mover> made(new Mover(std::move(device), gpu, std::move(memory), std::move(options)));
  CudaStatus status;
  try {
    status = made->Prepare();
  } catch (const std::system_error& error) {
    status = {CudaStatus::kResourceExhausted, std::string("no thread for copies: ") + error.what() +
                                                  "; raise the limit on threads (RLIMIT_NPROC, TasksMax=)"};
  }
  if (status.ok()) *mover = std::move(made);
  return status;
}

Mover::Mover(std::shared_ptr<const GpuDevice> device, CudaPointer gpu, MoverMemory memory, Options options)
    : device_(std::move(device)),
      driver_(device_->driver()),
      gpu_(gpu),
      memory_(std::move(memory)),
      options_(std::move(options)),
      uploads_(memory_.buckets.size(), options_.uploads_in_flight) {
  for (const MovedBucket& bucket : memory_.buckets) {
    max_chunks_ = std::max(max_chunks_, bucket.chunks);
    gpu_offsets_.push_back(bucket.gpu_offset);
  }
}

CudaStatus Mover::Prepare() {
  for (OwnedStream* stream : {&down_, &up_}) {
    if (CudaStatus status = MakeStream(*device_, stream); !status.ok()) return status;
  }
  if (!options_.landed) landed_.resize(memory_.buckets.size());
  for (OwnedEvent& event : landed_) {
    if (CudaStatus status = MakeEvent(*device_, &event); !status.ok()) return status;
  }
  const uint64_t sums_bytes = memory_.slots.count * max_chunks_ * sizeof(double);
  if (CudaStatus status = PinnedMemory::Allocate(device_, sums_bytes, &sums_); !status.ok()) return status;
  Register(memory_.gradients);
  if (memory_.parameters.data() != memory_.gradients.data()) Register(memory_.parameters);  // else it is that
  // Only a GPU that uses the host's page tables copies pageable memory without waiting and stores into it without
  // faults. That it can reach such memory at all (HMM) is not enough.
  staged_ = !unregistered_.empty() && !device_->Has(kCudaHostPageTables);
  // Copies that wait in the driver overtake nothing, and a trainer's thread must not issue one.
  if (staged_) uploads_.set_in_flight(std::numeric_limits<size_t>::max());
  const auto make = [this](const char* name) {
    return options_.make_queue ? options_.make_queue(device_, name) : std::make_unique<CompletionThread>(device_, name);
  };
  arrivals_ = make("so-arrivals");
  landings_ = make("so-landings");
  if (options_.upload_thread) starts_ = make("so-uploads");
  return {};
}

void Mover::Register(std::span<std::byte> host) {
  if (host.empty()) return;
  const unsigned flags = kCudaHostRegisterPortable | (options_.kernels_reach_host ? kCudaHostRegisterDeviceMap : 0);
  CudaStatus status =
      driver_.Status(driver_.MemHostRegister(host.data(), host.size(), flags),
                     "registering " + std::to_string(host.size()) +
                         " bytes of host memory (raise RLIMIT_MEMLOCK, LimitMEMLOCK=, of " + options_.process + ")");
  if (status.ok()) {
    registered_.push_back(host.data());
  } else {
    unregistered_.push_back(std::move(status));
  }
}

Mover::~Mover() {
  const CurrentDevice current(*device_);
  arrivals_.reset();
  if (!options_.landed && landings_ != nullptr) (void)WaitAllLanded();
  {
    const std::scoped_lock lock(issuing_mu_, up_mu_);  // what was taken has been issued, and nothing more is taken
    ends_ = true;
  }
  starts_.reset();
  landings_.reset();
  for (const OwnedStream* stream : {&down_, &up_}) {
    if (stream->get() != nullptr) driver_.StreamSynchronize(stream->get());
  }
  for (std::byte* host : registered_) driver_.MemHostUnregister(host);
  // While the device is current.
  landed_.clear();
  down_ = {};
  up_ = {};
}

CudaStatus Mover::CopyDown(uint32_t bucket, uint32_t slot, uint32_t host_slot, What what, Arrived arrived) {
  SUPEROFFLOAD_CHECK_LT(bucket, memory_.buckets.size());
  SUPEROFFLOAD_CHECK_LT(slot, memory_.slots.count);
  SUPEROFFLOAD_CHECK_LT(host_slot, memory_.buckets[bucket].host_slots());
  auto on_arrival = [this, bucket, slot, arrived = std::move(arrived)](const CudaStatus& status) {
    arrived(status, status.ok() ? SumOf(bucket, slot) : 0);
  };
  if (staged_) {  // such a copy waits in the driver: the queue's thread may, the caller not
    arrivals_->Then([this, bucket, slot, host_slot, what, on_arrival = std::move(on_arrival)](const CudaStatus&) {
      on_arrival(CopyDownAndWait(bucket, slot, host_slot, what));
    });
    return {};
  }
  if (CudaStatus status = IssueDown(bucket, slot, host_slot, what); !status.ok()) return status;
  return arrivals_->After(down_.get(), std::move(on_arrival));
}

CudaStatus Mover::CopyDownAndWait(uint32_t bucket, uint32_t slot, uint32_t host_slot, What what) {
  if (CudaStatus status = IssueDown(bucket, slot, host_slot, what); !status.ok()) return status;
  return driver_.Status(driver_.StreamSynchronize(down_.get()), "copying a gradient from the GPU");
}

CudaStatus Mover::CopyUpAndWait(uint32_t bucket) {
  if (CudaStatus status = IssueUp(bucket); !status.ok()) return status;
  return driver_.Status(driver_.StreamSynchronize(up_.get()), "copying parameters to the GPU");
}

CudaStatus Mover::IssueDown(uint32_t bucket, uint32_t slot, uint32_t host_slot, What what) {
  const MovedBucket& moved = memory_.buckets[bucket];
  if (what == What::kGradientAndSums) {
    if (CudaStatus status = driver_.Status(
            driver_.MemcpyDtoHAsync(memory_.gradients.data() + moved.GradientOffset(host_slot),
                                    gpu_ + memory_.slots.slot_offset(slot), moved.gradient_bytes, down_.get()),
            "copying a gradient from the GPU");
        !status.ok()) {
      return status;
    }
  }
  return driver_.Status(driver_.MemcpyDtoHAsync(SumsOf(slot), gpu_ + memory_.slots.sums_of(slot),
                                                moved.chunks * sizeof(double), down_.get()),
                        "copying sums from the GPU");
}

CudaStatus Mover::CopyToSlot(uint32_t bucket, uint32_t host_slot, uint32_t slot, CudaStream stream) {
  const MovedBucket& moved = memory_.buckets[bucket];
  return driver_.Status(
      driver_.MemcpyHtoDAsync(gpu_ + memory_.slots.slot_offset(slot),
                              memory_.gradients.data() + moved.GradientOffset(host_slot), moved.gradient_bytes, stream),
      "copying a gradient to the GPU");
}

double Mover::SumOf(uint32_t bucket, uint32_t slot) const {
  return SumOfChunks({SumsOf(slot), memory_.buckets[bucket].chunks});
}

void Mover::SetCopiesUp(uint32_t bucket, bool copies) {
  SUPEROFFLOAD_CHECK_LT(bucket, memory_.buckets.size());
  std::lock_guard lock(up_mu_);
  uploads_.SetCopied(bucket, copies);
}

void Mover::SetGpuOffset(uint32_t bucket, uint64_t offset) {
  SUPEROFFLOAD_CHECK_LT(bucket, memory_.buckets.size());
  std::lock_guard lock(up_mu_);
  gpu_offsets_[bucket] = offset;
}

CudaStatus Mover::Fetch(uint32_t bucket) {
  SUPEROFFLOAD_CHECK_LT(bucket, memory_.buckets.size());
  {
    std::lock_guard lock(up_mu_);
    if (uploads_.Fetch(bucket)) fetched_bytes_ += memory_.buckets[bucket].parameters_bytes;
  }
  return StartUploads();
}

uint64_t Mover::TakeFetchedBytes() {
  std::lock_guard lock(up_mu_);
  return std::exchange(fetched_bytes_, 0);
}

CudaStatus Mover::Published(uint64_t step, uint32_t bucket, bool speculative) {
  SUPEROFFLOAD_CHECK_LT(bucket, memory_.buckets.size());
  {
    std::lock_guard lock(up_mu_);
    uploads_.OnPublished(step, bucket, speculative);
  }
  return StartUploads();
}

CudaStatus Mover::VerdictReached(uint64_t step, bool commits, bool speculation_stands) {
  {
    std::lock_guard lock(up_mu_);
    uploads_.OnVerdict(step, commits, speculation_stands);
  }
  return StartUploads();
}

// Whoever calls it, only a thread that may enters the driver.
CudaStatus Mover::StartUploads() {
  {
    std::lock_guard lock(up_mu_);
    if (ends_ || !uploads_.ready()) return options_.upload_thread ? CudaStatus{} : up_failure_;
    if (options_.upload_thread) {
      if (!std::exchange(starting_, true)) starts_->Then([this](const CudaStatus&) { RunUploads(); });
      return {};
    }
  }
  return IssueUploads([this] { return Next(); });
}

void Mover::RunUploads() {
  {
    std::lock_guard lock(up_mu_);
    starting_ = false;
  }
  (void)IssueUploads([this] { return Next(); });  // `landed` is told of errors
}

std::optional<Mover::Upload> Mover::Next() { return ends_ ? std::nullopt : uploads_.Take(); }

// `take` is called with up_mu_ held, until it has no more.
CudaStatus Mover::IssueUploads(const std::function<std::optional<Upload>()>& take) {
  const CurrentDevice current(*device_);
  std::lock_guard issuing(issuing_mu_);
  while (true) {
    {
      std::lock_guard lock(up_mu_);
      issuing_ = take();
      if (!issuing_) return up_failure_;
    }
    const Upload upload = *issuing_;  // only who holds issuing_mu_ changes it
    if (const CudaStatus status = Issue(upload); !status.ok()) OnLanded(upload, status);
  }
}

CudaStatus Mover::Issue(const Upload& upload) {
  if (CudaStatus status = IssueUp(upload.bucket); !status.ok()) return status;
  if (!landed_.empty()) {
    if (CudaStatus status = RecordLanded(upload.bucket); !status.ok()) return status;
  }
  return landings_->After(up_.get(), [this, upload](const CudaStatus& done) {
    OnLanded(upload, done);
    (void)StartUploads();  // an error stays, for the next call
  });
}

void Mover::OnLanded(const Upload& upload, const CudaStatus& done) {
  {
    std::lock_guard lock(up_mu_);
    uploads_.OnLanded();
    if (up_failure_.ok()) up_failure_ = done;
  }
  if (options_.landed) options_.landed(upload.step, upload.bucket, done);
}

CudaStatus Mover::IssueUp(uint32_t bucket) {
  SUPEROFFLOAD_CHECK_LT(bucket, memory_.buckets.size());
  const MovedBucket& moved = memory_.buckets[bucket];
  uint64_t gpu_offset = 0;
  {
    std::lock_guard lock(up_mu_);
    gpu_offset = gpu_offsets_[bucket];
  }
  return driver_.Status(driver_.MemcpyHtoDAsync(gpu_ + gpu_offset, memory_.parameters.data() + moved.parameters_offset,
                                                moved.parameters_bytes, up_.get()),
                        "copying parameters to the GPU");
}

CudaStatus Mover::CopyUp(uint64_t step, uint32_t bucket) {
  if (CudaStatus status = IssueUp(bucket); !status.ok()) return status;
  return landings_->After(up_.get(),
                          [this, step, bucket](const CudaStatus& done) { options_.landed(step, bucket, done); });
}

CudaStatus Mover::RecordLanded(uint32_t bucket) {
  SUPEROFFLOAD_CHECK_LT(bucket, landed_.size());
  return driver_.Status(driver_.EventRecord(landed_[bucket].get(), up_.get()), "recording an event");
}

CudaStatus Mover::WaitLanded(uint32_t bucket, CudaStream stream) {
  SUPEROFFLOAD_CHECK_LT(bucket, landed_.size());
  bool on_its_way = false;  // or due: in no case is it issued yet
  CudaStatus failure;
  {
    std::lock_guard lock(up_mu_);
    on_its_way = uploads_.IsDue(bucket) || (issuing_ && issuing_->bucket == bucket);
    failure = up_failure_;
  }
  if (on_its_way) failure = IssueUploads([this, bucket] { return uploads_.Take(bucket); });
  if (!failure.ok()) return failure;
  return driver_.Status(driver_.StreamWaitEvent(stream, landed_[bucket].get(), 0), "waiting for parameters");
}

CudaStatus Mover::WaitAllLanded() {
  if (CudaStatus status = IssueUploads([this] { return uploads_.TakeAny(); }); !status.ok()) return status;
  return driver_.Status(driver_.StreamSynchronize(up_.get()), "copying parameters to the GPU");
}

}  // namespace superoffload::kernels
