#include "client/src/gpu/frozen_units.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "client/src/gpu/gpu_memory.h"
#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {

using kernels::CurrentDevice;
using kernels::kUnitGranule;

Status FrozenUnits::Open(int ordinal, std::span<std::byte> host, std::span<const uint64_t> bytes, uint32_t slots,
                         std::unique_ptr<FrozenUnits>* units) {
  if (bytes.empty() || slots == 0) {
    return Error(Code::kInvalidArgument, "nothing streams without units and slots; give at least one of each");
  }
  uint64_t total = 0;
  for (const uint64_t unit : bytes) {
    if (unit == 0 || unit > host.size() - total) {
      return Error(Code::kInvalidArgument, "units of ", unit, " bytes and others do not lie in host memory of ",
                   host.size());
    }
    total = std::min<uint64_t>(host.size(), total + WholePages(unit));
  }
  std::shared_ptr<const kernels::GpuDevice> device;
  if (Status status = FromCuda(kernels::GpuDevice::Open(ordinal, &device)); !status.ok()) return status;
  std::unique_ptr<FrozenUnits> made(new FrozenUnits(std::move(device), bytes.size(), slots));
  const CurrentDevice current(*made->device_);
  if (Status status = made->Open(host, bytes); !status.ok()) return status;
  *units = std::move(made);
  return {};
}

Status FrozenUnits::Open(std::span<std::byte> host, std::span<const uint64_t> bytes) {
  const uint64_t largest = *std::ranges::max_element(bytes);
  const kernels::UnitRanges ranges{.offset = kUnitGranule, .bytes = kernels::WholeGranules(largest), .count = count_};
  const GpuLayout nothing_else{.slots = {}, .bytes = kUnitGranule};
  const GpuMemoryRequest request{.device = device_,
                                 .layout = nothing_else,
                                 .units = ranges,
                                 .stream_slots = slots_,
                                 .mover = SUPEROFFLOAD_MOVER_TRAINER,
                                 .share = false};
  if (Status status = ReserveGpuMemory(request, &memory_); !status.ok()) return status;
  if (Status status = BackUnits(slots_, memory_.get()); !status.ok()) return status;
  kernels::MoverMemory moved{.gradients = {}, .parameters = host, .buckets = {}, .slots = {}};
  std::vector<uint32_t> numbers;
  uint64_t offset = 0;
  for (const uint64_t unit : bytes) {
    moved.buckets.push_back({.parameters_offset = offset,
                             .gpu_offset = ranges.offset + numbers.size() * ranges.bytes,
                             .parameters_bytes = unit});
    offset += WholePages(unit);
    numbers.push_back(static_cast<uint32_t>(numbers.size() + 1));
  }
  if (Status status = FromCuda(kernels::Mover::Open(device_, memory_->data(), std::move(moved),
                                                    {.process = "the trainer",
                                                     .kernels_reach_host = false,
                                                     .upload_thread = false,
                                                     .landed = nullptr,
                                                     .make_queue = {}},
                                                    &mover_));
      !status.ok()) {
    return status;
  }
  if (mover_->staged()) return FromCuda(mover_->unregistered().front());  // copies from there wait for each other
  stream_ = std::make_unique<kernels::WeightStream>(device_, kernels::UnitsOf(numbers), mover_.get());
  return FromCuda(stream_->Open(memory_->units()->slots()));
}

FrozenUnits::~FrozenUnits() {
  const CurrentDevice current(*device_);
  stream_.reset();
  mover_.reset();
  memory_.reset();
}

kernels::CudaPointer FrozenUnits::AddressOf(uint32_t unit) const {
  return memory_->data() + kUnitGranule + unit * slot_bytes();
}

Status FrozenUnits::CheckUnit(uint32_t unit) const {
  if (unit < count_) return {};
  return Error(Code::kInvalidArgument, "there is no unit ", unit, " that streams; there are ", count_);
}

Status FrozenUnits::Read(uint32_t unit, kernels::CudaStream stream) {
  if (Status status = CheckUnit(unit); !status.ok()) return status;
  const CurrentDevice current(*device_);
  if (Status status = FromCuda(kernels::CheckNotCapturing(*device_, stream)); !status.ok()) return status;
  return FromCuda(stream_->Read(unit, stream, [](uint32_t) { return true; }));
}

Status FrozenUnits::Has(uint32_t unit, uint32_t* has) const {
  if (Status status = CheckUnit(unit); !status.ok()) return status;
  *has = !stream_->Has(unit) ? 0 : stream_->Stays(unit) ? 2 : 1;
  return {};
}

Status FrozenUnits::Keep(std::span<const uint32_t> units) {
  std::vector<bool> stays(count_, false);
  for (const uint32_t unit : units) {
    if (Status status = CheckUnit(unit); !status.ok()) return status;
    stays[unit] = true;
  }
  const CurrentDevice current(*device_);
  return FromCuda(stream_->Keep(stays, slots_, memory_->units()));
}

}  // namespace superoffload::client
