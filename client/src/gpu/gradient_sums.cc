#include "client/src/gpu/gradient_sums.h"

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {

using kernels::CudaStream;

GradientSums::~GradientSums() {
  if (stream_.get() != nullptr) device_->driver().StreamSynchronize(stream_.get());
}

void GradientSums::OnSubmitted(uint32_t bucket) {
  const std::lock_guard lock(mu_);
  ++sums_[bucket].waiting;
}

Status GradientSums::OnIssued(uint32_t bucket, CudaStream down_stream) {
  const std::lock_guard lock(mu_);
  Sum& sum = sums_[bucket];
  --sum.waiting;
  if (sum.landed.get() == nullptr) {
    if (Status status = FromCuda(kernels::MakeEvent(*device_, &sum.landed)); !status.ok()) return status;
  }
  return Record(sum.landed, down_stream);
}

bool GradientSums::Issued(uint32_t bucket) {
  const std::lock_guard lock(mu_);
  return sums_[bucket].waiting == 0;
}

Status GradientSums::Fetch(kernels::Mover& mover, uint32_t bucket, uint32_t host_slot, uint32_t slot,
                           CudaStream pack_stream) {
  const std::lock_guard lock(mu_);
  if (stream_.get() == nullptr) {
    if (Status status = FromCuda(kernels::MakeStream(*device_, &stream_)); !status.ok()) return status;
    if (Status status = FromCuda(kernels::MakeEvent(*device_, &fetched_)); !status.ok()) return status;
  }
  if (Status status = Wait(sums_[bucket].landed, stream_.get()); !status.ok()) return status;
  if (Status status = FromCuda(mover.CopyToSlot(bucket, host_slot, slot, stream_.get())); !status.ok()) return status;
  if (Status status = Record(fetched_, stream_.get()); !status.ok()) return status;
  return Wait(fetched_, pack_stream);
}

Status GradientSums::Record(const kernels::OwnedEvent& event, CudaStream stream) const {
  const kernels::CudaDriver& driver = device_->driver();
  return FromCuda(driver.Status(driver.EventRecord(event.get(), stream), "recording an event"));
}

Status GradientSums::Wait(const kernels::OwnedEvent& event, CudaStream stream) const {
  const kernels::CudaDriver& driver = device_->driver();
  return FromCuda(driver.Status(driver.StreamWaitEvent(stream, event.get(), 0), "waiting for a gradient's sum"));
}

}  // namespace superoffload::client
