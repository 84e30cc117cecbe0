#include "tests/fault/simulated/simulated_gpu_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace superoffload::faults {

using simulator::SimulatedCuda;

SimulatedGpuMemory::SimulatedGpuMemory(Ground* ground) : ground_(*ground) {
  uint64_t most_parts = 0;
  for (const engine::BucketLayout& bucket : ground_.layout.buckets) {
    buckets_.push_back({.elements = bucket.elements,
                        .parameters_offset = bucket.parameters_offset,
                        .gradient_offsets = {bucket.gradient_offsets[0], bucket.gradient_offsets[1]},
                        .state_offset = bucket.state_offset,
                        .dtype = bucket.dtype,
                        .gradient_dtype = bucket.gradient_dtype,
                        .group = bucket.group});
    most_parts = std::max<uint64_t>(most_parts, bucket.part_count);
  }
  layout_ = client::PlanGpu(buckets_, ground_.layout.parameters_bytes, ground_.random.Between(1, 3), most_parts);
  bytes_.resize(layout_.bytes);
}

std::vector<kernels::MovedBucket> SimulatedGpuMemory::MovedBuckets() const {
  std::vector<kernels::MovedBucket> moved;
  for (const client::GpuBucket& bucket : buckets_) {
    moved.push_back({.gradient_offsets = {bucket.gradient_offsets[0], bucket.gradient_offsets[1]},
                     .gradient_bytes = bucket.gradient_bytes(),
                     .parameters_offset = bucket.parameters_offset,
                     .parameters_bytes = bucket.parameters_bytes(),
                     .chunks = bucket.chunks()});
  }
  return moved;
}

void SimulatedGpuMemory::Copy(const SimulatedCuda::Copy& copy, std::function<bool()> alive, std::function<void()> done) {
  ground_.log.Add("gpu", copy.to_gpu ? "copies up" : "copies down", copy.gpu - base(), copy.bytes);
  if (copy.gpu < base() || copy.gpu - base() + copy.bytes > bytes_.size()) Fail("a copy of memory that is not there");
  CopyRest(copy, 0, std::move(alive), std::move(done));
}

void SimulatedGpuMemory::CopyRest(const SimulatedCuda::Copy& copy, size_t done_bytes, std::function<bool()> alive,
                                  std::function<void()> done) {
  ground_.time.After(ground_.random.Delay(), [self = shared_from_this(), copy, done_bytes, alive, done] {
    if (!alive()) return;
    RandomSource& random = self->ground_.random;
    const size_t rest = copy.bytes - done_bytes, bytes = random.Chance(0.5) ? rest : random.Between(1, rest);
    std::byte* const gpu = reinterpret_cast<std::byte*>(copy.gpu) + done_bytes;
    std::byte* const host = copy.host + done_bytes;
    copy.to_gpu ? std::memcpy(gpu, host, bytes) : std::memcpy(host, gpu, bytes);
    bytes == rest ? done() : self->CopyRest(copy, done_bytes + bytes, alive, done);
  });
}

}  // namespace superoffload::faults
