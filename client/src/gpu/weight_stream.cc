// Invariant: a bucket that streams is copied up only while its unit has the slot, and what was given to the up stream
// before the unit had it has waited for the slot's readers.
#include "client/src/gpu/weight_stream.h"

#include <algorithm>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {

using kernels::CudaStream;

Status WeightStream::Open() {
  if (units_.empty()) return {};
  for (const StreamedUnit& unit : units_) {
    slots_.resize(std::max<size_t>(slots_.size(), unit.slot + 1));
    for (const uint32_t bucket : unit.buckets) mover_.SetCopiesUp(bucket, false);
  }
  return FromCuda(kernels::MakeEvent(*device_, &read_));
}

// Whoever has the memory next knows nothing of them.
WeightStream::~WeightStream() {
  for (const CudaStream stream : reading_) device_->driver().StreamSynchronize(stream);
}

Status WeightStream::Find(uint32_t number, uint32_t* index) const {
  const auto found = std::ranges::find(units_, number, &StreamedUnit::number);
  if (found == units_.end()) {
    return Error(Code::kInvalidArgument, "there is no unit ", number,
                 " that streams; superoffload_bucket.unit names them");
  }
  *index = static_cast<uint32_t>(found - units_.begin());
  return {};
}

Status WeightStream::Read(uint32_t index, CudaStream stream, const IsFinal& is_final) {
  const std::lock_guard lock(mu_);
  if (SlotOf(index).owner != index) {
    if (Status status = Place(index); !status.ok()) return status;
  }
  if (Status status = Fetch(index); !status.ok()) return status;
  for (const uint32_t bucket : buckets(index)) {
    if (Status status = FromCuda(mover_.WaitLanded(bucket, stream)); !status.ok()) return status;
  }
  SlotOf(index).readers.insert(stream);
  reading_.insert(stream);
  order_.Use(index);
  return FetchAhead(index, is_final);
}

bool WeightStream::Has(uint32_t index) const {
  const std::lock_guard lock(mu_);
  return slots_[units_[index].slot].owner == index;
}

Status WeightStream::Place(uint32_t index) {
  Slot& slot = SlotOf(index);
  Vacate(&slot);
  if (Status status = WaitForReaders(&slot); !status.ok()) return status;
  for (const uint32_t bucket : buckets(index)) mover_.SetCopiesUp(bucket, true);
  slot.owner = index;
  return {};
}

void WeightStream::Vacate(Slot* slot) {
  if (!slot->owner) return;
  for (const uint32_t bucket : buckets(*slot->owner)) mover_.SetCopiesUp(bucket, false);
  slot->owner.reset();
}

Status WeightStream::WaitForReaders(Slot* slot) {
  const kernels::CudaDriver& driver = device_->driver();
  for (const CudaStream reader : slot->readers) {
    kernels::CudaStatus status = kernels::CheckNotCapturing(*device_, reader);
    if (status.ok()) status = driver.Status(driver.EventRecord(read_.get(), reader), "recording an event");
    if (status.ok()) {
      status =
          driver.Status(driver.StreamWaitEvent(mover_.up_stream(), read_.get(), 0), "waiting for a slot's readers");
    }
    if (!status.ok()) return FromCuda(status);
  }
  slot->readers.clear();
  return {};
}

// As far as no unit has to leave its slot that is expected before the one that takes it.
Status WeightStream::FetchAhead(uint32_t index, const IsFinal& is_final) {
  std::vector<bool> taken(slots_.size(), false);
  taken[units_[index].slot] = true;
  for (const uint32_t next : order_.Expect(slots_.size())) {
    if (SlotOf(next).owner != next) {
      if (taken[units_[next].slot]) break;
      if (Status status = Place(next); !status.ok()) return status;
    }
    taken[units_[next].slot] = true;
    // Else it comes when it is published.
    if (!std::ranges::all_of(buckets(next), is_final)) continue;
    if (Status status = Fetch(next); !status.ok()) return status;
  }
  return {};
}

Status WeightStream::Fetch(uint32_t index) {
  for (const uint32_t bucket : buckets(index)) {
    if (Status status = FromCuda(mover_.Fetch(bucket)); !status.ok()) return status;
  }
  return {};
}

Status WeightStream::EndStep(GradientPacker* packer) {
  const std::lock_guard lock(mu_);
  for (const CudaStream stream : reading_) {
    if (Status status = packer->After(stream); !status.ok()) return status;
  }
  reading_.clear();
  for (Slot& slot : slots_) {
    if (!slot.readers.empty()) slot.readers = {packer->stream()};
  }
  return {};
}

void WeightStream::Empty() {
  const std::lock_guard lock(mu_);
  for (Slot& slot : slots_) Vacate(&slot);
}

}  // namespace superoffload::client
