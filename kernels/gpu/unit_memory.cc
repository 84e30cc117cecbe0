// Invariant: the first slots_.size() units are mapped, each to its slot of memory_.
#include "kernels/gpu/unit_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::kernels {

std::vector<uint32_t> SlotsOf(const std::vector<bool>& stays, uint32_t shared) {
  const auto streaming = static_cast<uint32_t>(std::ranges::count(stays, false));
  std::vector<uint32_t> slots;
  uint32_t turn = 0, own = std::min(shared, streaming);
  for (const bool stay : stays) slots.push_back(stay ? own++ : turn++ % shared);
  return slots;
}

UnitMemory::~UnitMemory() { (void)Map({}); }

CudaStatus UnitMemory::Map(std::vector<uint32_t> slots) {
  SUPEROFFLOAD_CHECK(slots.empty() || slots.size() == ranges_.count, slots.size(), " slots for ", ranges_.count);
  const size_t needed = slots.empty() ? 0 : 1 + *std::ranges::max_element(slots);
  if (CudaStatus status = Allocate(needed); !status.ok()) return status;
  if (CudaStatus status = UnmapAll(); !status.ok()) return status;
  if (CudaStatus status = ReleaseFrom(needed); !status.ok()) return status;
  for (const uint32_t slot : slots) {
    if (CudaStatus status = MapNext(slot); !status.ok()) return status;
  }
  return {};
}

CudaStatus UnitMemory::Allocate(size_t slots) {
  const size_t before = memory_.size();
  CudaAllocationProperties properties;
  properties.handle_types = 0;
  properties.location.id = device_->handle();
  while (memory_.size() < slots) {
    CudaAllocation allocation = 0;
    CudaStatus status = device_->driver().Status(
        device_->driver().MemCreate(&allocation, ranges_.bytes, &properties, 0),
        "allocating " + std::to_string(ranges_.bytes) + " bytes of GPU memory for weights that stream");
    if (!status.ok()) {
      (void)ReleaseFrom(before);
      return status;
    }
    memory_.push_back(allocation);
  }
  return {};
}

CudaStatus UnitMemory::MapNext(uint32_t slot) {
  const CudaDriver& driver = device_->driver();
  const CudaPointer at = AddressOf(slots_.size());
  CudaStatus status =
      driver.Status(driver.MemMap(at, ranges_.bytes, 0, memory_[slot], 0), "mapping memory of weights that stream");
  if (!status.ok()) return status;
  slots_.push_back(slot);
  CudaAccess access;
  access.location.id = device_->handle();
  return driver.Status(driver.MemSetAccess(at, ranges_.bytes, &access, 1), "opening access to weights that stream");
}

CudaStatus UnitMemory::UnmapAll() {
  for (; !slots_.empty(); slots_.pop_back()) {
    CudaStatus status =
        device_->driver().Status(device_->driver().MemUnmap(AddressOf(slots_.size() - 1), ranges_.bytes),
                                 "unmapping memory of weights that stream");
    if (!status.ok()) return status;
  }
  return {};
}

CudaStatus UnitMemory::ReleaseFrom(size_t slot) {
  for (; memory_.size() > slot; memory_.pop_back()) {
    CudaStatus status = device_->driver().Status(device_->driver().MemRelease(memory_.back()),
                                                 "giving memory of weights that stream back");
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace superoffload::kernels
