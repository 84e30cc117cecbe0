#include "tests/fault/simulated/simulated_gpu_memory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "client/src/core/model_layout.h"
#include "client/src/gpu/stream_layout.h"

namespace superoffload::faults {

namespace {

constexpr double kNoMemory = 0.1;  // of the resident buckets

fake_cuda::Machine Superchip() { return fake_cuda::FindMachine("gh200"); }

}  // namespace

uint32_t NumberOf(kernels::DType dtype) {
  for (uint32_t number = 1; number <= 3; ++number) {
    kernels::DType named;
    if (client::ToDType(number, &named) && named == dtype) return number;
  }
  Fail("a dtype without a number");
}

// Pinned memory of the driver's is asked for, too, and is there.
SimulatedGpuMemory::SimulatedGpuMemory(Ground* ground)
    : ground_(*ground), memory_(Superchip, [this] { return finds_none_ && ground_.random.Chance(kNoMemory); }) {
  uint64_t most_parts = 0;
  for (const engine::BucketLayout& bucket : ground_.layout.buckets) {
    buckets_.push_back({.elements = bucket.elements,
                        .parameters_offset = bucket.parameters_offset,
                        .gradient_offsets = {bucket.gradient_offsets[0], bucket.gradient_offsets[1]},
                        .state_offset = bucket.state_offset,
                        .log_offset = bucket.log_offset,
                        .log_slots = bucket.log_slots,
                        .dtype = bucket.dtype,
                        .gradient_dtype = bucket.gradient_dtype,
                        .group = bucket.group,
                        .format = bucket.format,
                        .unit = ground_.scenario.stream_slots == 0 ? 0 : bucket.unit});
    most_parts = std::max<uint64_t>(most_parts, bucket.part_count);
  }
  ground_.scenario.stream_slots == 0 ? Place() : LayOutStreams();
  layout_ = client::PlanGpu(buckets_, ground_.random.Between(1, 3), most_parts);
  const client::Status status = client::FindUnits(buckets_, layout_, &units_);
  if (!status.ok()) Fail("finding units: ", status.message);
  bytes_ = kernels::WholeGranules(layout_.bytes);
  addresses_ = std::max(bytes_, units_.end());
  if (memory_.Reserve(&base_, addresses_, 0, 0, 0) != 0) Fail("there are no addresses");
  const kernels::CudaAllocation allocation = Create(bytes_);
  Map(0, bytes_, allocation);
  memory_.Release(allocation);
  if (units_.count > 0) {
    MapUnits(kernels::SlotsOf(std::vector<bool>(units_.count, false), ground_.scenario.stream_slots));
  }
}

kernels::CudaAllocation SimulatedGpuMemory::Create(uint64_t bytes) {
  const kernels::CudaAllocationProperties properties;
  kernels::CudaAllocation allocation = 0;
  if (memory_.Create(&allocation, bytes, &properties, 0) != 0) Fail("there is no GPU memory for the parameters");
  return allocation;
}

void SimulatedGpuMemory::Map(uint64_t offset, uint64_t bytes, kernels::CudaAllocation allocation) {
  const kernels::CudaAccess access;
  if (memory_.Map(base_ + offset, bytes, 0, allocation, 0) != 0 ||
      memory_.SetAccess(base_ + offset, bytes, &access, 1) != 0) {
    Fail("GPU memory cannot be mapped");
  }
}

// Nothing of what was there is left.
void SimulatedGpuMemory::MapUnits(std::vector<uint32_t> slots) {
  for (size_t unit = 0; unit < slots_.size(); ++unit) {
    memory_.Unmap(base_ + units_.offset + unit * units_.bytes, units_.bytes);
  }
  slots_ = std::move(slots);
  std::map<uint32_t, kernels::CudaAllocation> of_slot;
  for (size_t unit = 0; unit < slots_.size(); ++unit) {
    const auto [slot, is_new] = of_slot.emplace(slots_[unit], 0);
    if (is_new) slot->second = Create(units_.bytes);
    Map(units_.offset + unit * units_.bytes, units_.bytes, slot->second);
  }
  for (const auto& [slot, allocation] : of_slot) memory_.Release(allocation);
}

// Buckets in any order.
void SimulatedGpuMemory::Place() {
  std::vector<client::GpuBucket*> order;
  for (client::GpuBucket& bucket : buckets_) order.push_back(&bucket);
  uint64_t end = 0;
  while (!order.empty()) {
    std::swap(order[ground_.random.Below(order.size())], order.back());
    order.back()->gpu_offset = end;
    end += order.back()->parameters_bytes();
    order.pop_back();
  }
}

void SimulatedGpuMemory::LayOutStreams() {
  std::vector<superoffload_bucket> given(buckets_.size());
  for (size_t i = 0; i < given.size(); ++i) {
    given[i].elements = buckets_[i].elements;
    given[i].gpu_offset = buckets_[i].parameters_offset;
    given[i].dtype = NumberOf(buckets_[i].dtype);
    given[i].gradient_dtype = NumberOf(buckets_[i].gradient_dtype);
    given[i].unit = buckets_[i].unit;
  }
  std::vector<uint64_t> offsets(given.size());
  uint64_t bytes = 0;
  const client::Status status = client::LayOutStreams(given, ground_.scenario.stream_slots, offsets, &bytes);
  if (!status.ok()) Fail("laying out slots: ", status.message);
  for (size_t i = 0; i < offsets.size(); ++i) buckets_[i].gpu_offset = offsets[i];
}

SimulatedGpuMemory::~SimulatedGpuMemory() {
  MapUnits({});
  memory_.Unmap(base_, bytes_);
  memory_.Unreserve(base_, addresses_);
}

std::span<std::byte> SimulatedGpuMemory::parameters(uint32_t bucket) {
  const uint64_t bytes = buckets_[bucket].parameters_bytes();
  const auto* const there = reinterpret_cast<const void*>(base_ + buckets_[bucket].gpu_offset);
  return {static_cast<std::byte*>(memory_.OnGpu(there, bytes)), bytes};
}

std::vector<kernels::MovedBucket> SimulatedGpuMemory::MovedBuckets() const {
  std::vector<kernels::MovedBucket> moved;
  for (const client::GpuBucket& bucket : buckets_) moved.push_back(bucket.moved());
  return moved;
}

// Keeps the memory: events may be on their way when everybody else has left it.
class SimulatedGpuMemory::User final : public fake_cuda::Process {
 public:
  User(simulator::Clock* clock, std::shared_ptr<SimulatedGpuMemory> memory, std::function<bool()> alive,
       std::function<bool()> waits)
      : Process(clock, &memory->memory_),
        memory_(std::move(memory)),
        alive_(std::move(alive)),
        waits_(std::move(waits)) {}

  void SetFault() override { Fail("the GPU is to use memory that is not there"); }

  void Move(const simulator::GpuCopy& copy, const std::function<void(size_t, size_t)>& move,
            const Done& done) override {
    if (waits_()) {
      move(0, copy.bytes);
      return done();
    }
    memory_->ground_.log.Add("gpu", copy.to_gpu ? "copies up" : "copies down", copy.gpu - memory_->base(), copy.bytes);
    MoveRest(0, copy.bytes, move, done);
  }

  void Work(const std::function<void()>& work, const Done& done) override {
    Later([work, done] {
      work();
      done();
    });
  }

 private:
  void MoveRest(size_t first, size_t end, std::function<void(size_t, size_t)> move, Done done) {
    Later([this, first, end, move = std::move(move), done = std::move(done)] {
      RandomSource& random = memory_->ground_.random;
      const size_t rest = end - first, bytes = random.Chance(0.5) ? rest : random.Between(1, rest);
      move(first, bytes);
      bytes == rest ? done() : MoveRest(first + bytes, end, move, done);
    });
  }

  void Later(std::function<void()> event) {
    Ground& ground = memory_->ground_;
    ground.time.After(ground.random.Delay(), [this, event = std::move(event)] {
      if (alive_()) event();
    });
  }

  const std::shared_ptr<SimulatedGpuMemory> memory_;
  const std::function<bool()> alive_, waits_;
};

std::unique_ptr<fake_cuda::Process> SimulatedGpuMemory::MakeProcess(simulator::Clock* clock,
                                                                    std::function<bool()> alive,
                                                                    std::function<bool()> waits) {
  return std::make_unique<User>(clock, shared_from_this(), std::move(alive), std::move(waits));
}

}  // namespace superoffload::faults
