#include "client/src/gpu/resident_buckets.h"

#include <utility>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {

Status ResidentBuckets::Add(const std::shared_ptr<const kernels::GpuDevice>& device, uint32_t index,
                            const GpuBucket& bucket, const std::array<const float*, 3>& arrays,
                            kernels::CudaStream stream) {
  const kernels::CudaDriver& driver = device->driver();
  Resident resident{device, bucket, nullptr};
  const uint64_t array_bytes = bucket.elements * sizeof(float);
  kernels::CudaStatus status = kernels::SharedGpuMemory::Allocate(device, 3 * array_bytes + bucket.gradient_bytes(),
                                                                  kernels::Sharing::kNone, &resident.memory);
  for (size_t i = 0; i < arrays.size() && status.ok(); ++i) {
    status = driver.Status(driver.MemcpyHtoDAsync(resident.array(i), arrays[i], array_bytes, stream),
                           "copying optimizer state to the GPU");
  }
  if (status.ok()) status = driver.Status(driver.StreamSynchronize(stream), "copying optimizer state to the GPU");
  if (status.ok()) buckets_.insert_or_assign(index, std::move(resident));
  return FromCuda(status);
}

uint64_t ResidentBuckets::bytes() const {
  uint64_t bytes = 0;
  for (const auto& [index, resident] : buckets_) bytes += resident.memory->bytes();
  return bytes;
}

Status ResidentBuckets::KeepGradient(uint32_t index, kernels::CudaPointer slot, kernels::CudaStream stream) const {
  const Resident& resident = buckets_.at(index);
  const kernels::CudaDriver& driver = resident.device->driver();
  return FromCuda(
      driver.Status(driver.MemcpyDtoDAsync(resident.gradient(), slot, resident.bucket.gradient_bytes(), stream),
                    "keeping the gradient of a resident bucket"));
}

Status ResidentBuckets::Update(uint32_t index, const kernels::CudaKernels& kernels, const kernels::AdamStep& step,
                               kernels::CudaPointer theta, kernels::CudaStream stream) const {
  const Resident& resident = buckets_.at(index);
  const auto array = [&](size_t i) { return reinterpret_cast<float*>(resident.array(i)); };
  return FromCuda(kernels.ResidentAdam(
      {.state = {array(0), array(1), array(2)},
       .step = step,
       .gradient = {reinterpret_cast<const void*>(resident.gradient()), resident.bucket.gradient_dtype},
       .theta = {reinterpret_cast<void*>(theta), resident.bucket.dtype},
       .elements = resident.bucket.elements},
      stream));
}

}  // namespace superoffload::client
