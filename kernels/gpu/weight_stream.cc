// Invariant: a bucket that streams is copied up only while its unit has the slot, and what was given to the up stream
// before the unit had it has waited for the slot's readers.
#include "kernels/gpu/weight_stream.h"

#include <algorithm>
#include <map>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::kernels {

std::vector<StreamedUnit> UnitsOf(std::span<const uint32_t> numbers) {
  std::map<uint32_t, std::vector<uint32_t>> buckets;
  for (uint32_t bucket = 0; bucket < numbers.size(); ++bucket) {
    if (numbers[bucket] != 0) buckets[numbers[bucket]].push_back(bucket);
  }
  std::vector<StreamedUnit> units;
  for (auto& [number, of_unit] : buckets) units.push_back({number, std::move(of_unit)});
  return units;
}

CudaStatus WeightStream::Open(std::vector<uint32_t> slots) {
  if (units_.empty()) return {};
  for (const StreamedUnit& unit : units_) {
    for (const uint32_t bucket : unit.buckets) mover_.SetCopiesUp(bucket, false);
  }
  if (CudaStatus status = MakeEvent(*device_, &read_); !status.ok()) return status;
  return Enter(std::move(slots));
}

CudaStatus WeightStream::Enter(std::vector<uint32_t> slots) {
  SUPEROFFLOAD_CHECK_EQ(slots.size(), units_.size());
  const std::lock_guard lock(mu_);
  slot_of_ = std::move(slots);
  slots_.assign(slot_of_.empty() ? 0 : 1 + *std::ranges::max_element(slot_of_), {});
  for (const uint32_t slot : slot_of_) ++slots_[slot].sharers;
  return FillThoseThatStay();
}

CudaStatus WeightStream::Keep(const std::vector<bool>& stays, uint32_t shared, UnitMemory* memory) {
  if (CudaStatus status = Leave(); !status.ok()) return status;
  CudaStatus mapped = memory->Map(SlotsOf(stays, shared));
  if (!mapped.ok() && (mapped.code != CudaStatus::kResourceExhausted || memory->slots().empty())) return mapped;
  CudaStatus entered = Enter(memory->slots());
  return mapped.ok() ? entered : mapped;
}

CudaStatus WeightStream::Leave() {
  const std::lock_guard lock(mu_);
  VacateAll();  // nothing more is copied there
  if (CudaStatus status = mover_.WaitAllLanded(); !status.ok()) return status;
  std::set<CudaStream> readers = reading_;
  for (const Slot& slot : slots_) readers.insert(slot.readers.begin(), slot.readers.end());
  const CudaDriver& driver = device_->driver();
  for (const CudaStream reader : readers) {
    CudaStatus status = driver.Status(driver.StreamSynchronize(reader), "waiting for who reads weights that stream");
    if (!status.ok()) return status;
  }
  return {};
}

CudaStatus WeightStream::Renew() {
  const std::lock_guard lock(mu_);
  VacateAll();
  return FillThoseThatStay();
}

void WeightStream::VacateAll() {
  for (Slot& slot : slots_) Vacate(&slot);
}

CudaStatus WeightStream::FillThoseThatStay() {
  for (uint32_t index = 0; index < units_.size(); ++index) {
    if (!IsAlone(index)) continue;
    if (CudaStatus status = Place(index); !status.ok()) return status;
    if (CudaStatus status = Fetch(index); !status.ok()) return status;
  }
  return {};
}

// Whoever has the memory next knows nothing of them.
WeightStream::~WeightStream() {
  for (const CudaStream stream : reading_) device_->driver().StreamSynchronize(stream);
}

std::optional<uint32_t> WeightStream::Find(uint32_t number) const {
  const auto found = std::ranges::find(units_, number, &StreamedUnit::number);
  if (found == units_.end()) return std::nullopt;
  return static_cast<uint32_t>(found - units_.begin());
}

CudaStatus WeightStream::Read(uint32_t index, CudaStream stream, const IsFinal& is_final) {
  const std::lock_guard lock(mu_);
  if (SlotOf(index).owner != index) {
    if (CudaStatus status = Place(index); !status.ok()) return status;
  }
  if (CudaStatus status = Fetch(index); !status.ok()) return status;
  for (const uint32_t bucket : buckets(index)) {
    if (CudaStatus status = mover_.WaitLanded(bucket, stream); !status.ok()) return status;
  }
  SlotOf(index).readers.insert(stream);
  reading_.insert(stream);
  if (IsAlone(index)) return FetchAhead(std::nullopt, is_final);
  order_.Use(index);
  return FetchAhead(index, is_final);
}

bool WeightStream::Stays(uint32_t index) const {
  const std::lock_guard lock(mu_);
  return IsAlone(index);
}

bool WeightStream::Has(uint32_t index) const {
  const std::lock_guard lock(mu_);
  return slots_[slot_of_[index]].owner == index;
}

CudaStatus WeightStream::Place(uint32_t index) {
  Slot& slot = SlotOf(index);
  Vacate(&slot);
  if (CudaStatus status = WaitForReaders(&slot); !status.ok()) return status;
  for (const uint32_t bucket : buckets(index)) mover_.SetCopiesUp(bucket, true);
  slot.owner = index;
  return {};
}

void WeightStream::Vacate(Slot* slot) {
  if (!slot->owner) return;
  for (const uint32_t bucket : buckets(*slot->owner)) mover_.SetCopiesUp(bucket, false);
  slot->owner.reset();
}

CudaStatus WeightStream::WaitForReaders(Slot* slot) {
  for (const CudaStream reader : slot->readers) {
    CudaStatus status = WaitForStream(*device_, mover_.up_stream(), reader, read_.get());
    if (!status.ok()) return status;
  }
  slot->readers.clear();
  return {};
}

// As far as no unit has to leave its slot that is expected before the one that takes it.
CudaStatus WeightStream::FetchAhead(std::optional<uint32_t> reading, const IsFinal& is_final) {
  std::vector<bool> taken(slots_.size(), false);
  if (reading) taken[slot_of_[*reading]] = true;
  for (const uint32_t next : order_.Expect(slots_.size())) {
    if (SlotOf(next).owner != next) {
      if (taken[slot_of_[next]]) break;
      if (CudaStatus status = Place(next); !status.ok()) return status;
    }
    taken[slot_of_[next]] = true;
    // Else it comes when it is published.
    if (!std::ranges::all_of(buckets(next), is_final)) continue;
    if (CudaStatus status = Fetch(next); !status.ok()) return status;
  }
  return {};
}

CudaStatus WeightStream::Fetch(uint32_t index) {
  for (const uint32_t bucket : buckets(index)) {
    if (CudaStatus status = mover_.Fetch(bucket); !status.ok()) return status;
  }
  return {};
}

bool WeightStream::EndStep(CudaStream end, const std::function<bool(CudaStream)>& wait_for) {
  const std::lock_guard lock(mu_);
  for (const CudaStream stream : reading_) {
    if (!wait_for(stream)) return false;
  }
  reading_.clear();
  for (Slot& slot : slots_) {
    if (!slot.readers.empty()) slot.readers = {end};
  }
  return true;
}

}  // namespace superoffload::kernels
