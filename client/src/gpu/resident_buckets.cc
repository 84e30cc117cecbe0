#include "client/src/gpu/resident_buckets.h"

#include <span>
#include <utility>

#include "client/src/gpu/gpu_status.h"
#include "kernels/base/check.h"

namespace superoffload::client {

ResidentBuckets::ResidentBuckets(std::shared_ptr<const kernels::GpuDevice> device,
                                 const std::vector<GpuBucket>* buckets, std::unique_ptr<ResidentSteps> steps)
    : device_(std::move(device)),
      buckets_(*buckets),
      steps_(std::move(steps)),
      first_(static_cast<uint32_t>(buckets->size())) {}

Status ResidentBuckets::SetCount(uint32_t count, const std::byte* state, kernels::CudaStream stream) {
  const auto total = static_cast<uint32_t>(buckets_.size());
  if (count > total) {
    return Error(Code::kInvalidArgument, count, " resident buckets, but there are ", total);
  }
  for (uint32_t index = total - count; index < total; ++index) {
    const kernels::Algorithm& algorithm = *steps_->FormatOf(buckets_[index]).algorithm;
    if (algorithm.resident_kernel != nullptr) continue;
    return Error(Code::kUnimplemented, "no bucket can be resident: ", std::string(algorithm.name),
                 " has no kernel for the GPU; set resident_buckets to 0");
  }
  for (; first_ < total - count; ++first_) residents_.erase(first_);
  while (first_ > total - count) {
    const uint32_t index = first_ - 1;
    if (Status status = Add(index, state, stream); !status.ok()) return status;
    first_ = index;
  }
  SUPEROFFLOAD_CHECK_EQ(residents_.size(), total - first_);
  return {};
}

Status ResidentBuckets::Add(uint32_t index, const std::byte* state, kernels::CudaStream stream) {
  constexpr uint64_t kAlignment = 256;  // of what a kernel reads in vectors
  const kernels::CudaDriver& driver = device_->driver();
  const ResidentSteps::Format& format = steps_->FormatOf(buckets_[index]);
  const std::span<const kernels::StateArray> arrays = format.algorithm->arrays;
  Resident resident{buckets_[index], {0}, nullptr};
  for (const kernels::StateArray& array : arrays) {
    const uint64_t end = resident.offsets.back() + array.Bytes(resident.bucket.elements);
    resident.offsets.push_back((end + kAlignment - 1) / kAlignment * kAlignment);
  }
  kernels::CudaStatus status = kernels::SharedGpuMemory::Allocate(
      device_, resident.offsets.back() + resident.bucket.gradient_bytes(), &resident.memory);
  for (size_t i = 0; i < arrays.size() && status.ok(); ++i) {
    const std::byte* const from = state + format.offsets[i] + arrays[i].Bytes(resident.bucket.state_offset);
    status = driver.Status(
        driver.MemcpyHtoDAsync(resident.array(i), from, arrays[i].Bytes(resident.bucket.elements), stream),
        "copying optimizer state to the GPU");
  }
  if (status.ok()) status = driver.Status(driver.StreamSynchronize(stream), "copying optimizer state to the GPU");
  if (status.ok()) residents_.insert_or_assign(index, std::move(resident));
  return FromCuda(status);
}

Status ResidentBuckets::KeepGradient(uint32_t bucket, kernels::CudaPointer slot, kernels::CudaStream stream) const {
  const Resident& resident = residents_.at(bucket);
  const kernels::CudaDriver& driver = device_->driver();
  return FromCuda(
      driver.Status(driver.MemcpyDtoDAsync(resident.gradient(), slot, resident.bucket.gradient_bytes(), stream),
                    "keeping the gradient of a resident bucket"));
}

Status ResidentBuckets::Update(const superoffload_verdict_payload& verdict, const kernels::CudaKernels& kernels,
                               kernels::CudaPointer gpu, kernels::Mover* mover) {
  if (Status status = steps_->OnCommit(verdict.clip_coefficient); !status.ok()) return status;
  // Their gradients are complete: the daemon would not know the verdict otherwise.
  for (auto entry = residents_.rbegin(); entry != residents_.rend(); ++entry) {
    const auto& [index, resident] = *entry;
    if (Status status =
            UpdateOne(resident, kernels, steps_->RunsOf(index), gpu + resident.bucket.gpu_offset, mover->up_stream());
        !status.ok()) {
      return status;
    }
    if (Status status = FromCuda(mover->RecordLanded(index)); !status.ok()) return status;
  }
  return {};
}

Status ResidentBuckets::UpdateOne(const Resident& resident, const kernels::CudaKernels& kernels,
                                  const std::vector<ResidentSteps::Run>& runs, kernels::CudaPointer theta,
                                  kernels::CudaStream stream) const {
  const kernels::DType dtype = resident.bucket.dtype, gradient_dtype = resident.bucket.gradient_dtype;
  const kernels::Algorithm& algorithm = *steps_->FormatOf(resident.bucket).algorithm;
  const auto at = [](kernels::CudaPointer base, uint64_t bytes) { return reinterpret_cast<void*>(base + bytes); };
  for (const ResidentSteps::Run& run : runs) {
    kernels::ResidentArguments arguments{
        .state = {},
        .constants = run.constants,
        .gradient = {at(resident.gradient(), run.first * kernels::DTypeBytes(gradient_dtype)), gradient_dtype},
        .theta = {at(theta, run.first * kernels::DTypeBytes(dtype)), dtype},
        .elements = run.elements};
    if (algorithm.rounds_stochastically()) {
      arguments.state.rounding = {run.rounding.key, nullptr, run.rounding.first};
      arguments.box = *run.rounding.box;
    }
    for (size_t i = 0; i < algorithm.arrays.size(); ++i) {
      arguments.state.arrays[i] = at(resident.array(i), algorithm.arrays[i].Bytes(run.first));
    }
    if (Status status = FromCuda(kernels.Resident(algorithm, arguments, stream)); !status.ok()) return status;
  }
  return {};
}

}  // namespace superoffload::client
