#include "client/src/gpu/measure_cast.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "client/src/gpu/gpu_status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/gpu/pinned_memory.h"
#include "kernels/gpu/shared_gpu_memory.h"

namespace superoffload::client {
namespace {

using kernels::CudaPointer;
using kernels::CudaStatus;
using kernels::DType;
using kernels::PackedTensor;

constexpr size_t kRounds = 7;

// As memory of its own would be.
constexpr uint64_t Aligned(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

// A gradient, a slot and what packing needs, on one GPU.
class Rehearsal {
 public:
  CudaStatus Open(int ordinal, DType dtype, uint64_t elements) {
    elements_ = elements;
    if (CudaStatus status = kernels::GpuDevice::Open(ordinal, &device_); !status.ok()) return status;
    const kernels::CurrentDevice current(*device_);
    if (CudaStatus status = kernels_.Load(device_->driver(), device_->handle()); !status.ok()) return status;
    if (CudaStatus status = kernels::MakeStream(*device_, &stream_); !status.ok()) return status;
    const uint64_t chunks = elements / kernels::kChunkElements + 1;
    slot_offset_ = Aligned(elements * kernels::DTypeBytes(dtype));
    sums_offset_ = slot_offset_ + Aligned(elements * sizeof(float));
    if (CudaStatus status =
            kernels::SharedGpuMemory::Allocate(device_, sums_offset_ + chunks * sizeof(double), &memory_);
        !status.ok()) {
      return status;
    }
    begins_offset_ = sizeof(PackedTensor);
    gradient_offset_ = begins_offset_ + (chunks + 2) / 2 * 2 * sizeof(uint32_t);
    if (CudaStatus status =
            kernels::PinnedMemory::Allocate(device_, gradient_offset_ + elements * sizeof(float), &host_);
        !status.ok()) {
      return status;
    }
    auto* const table = reinterpret_cast<PackedTensor*>(host_.data());
    auto* const begins = reinterpret_cast<uint32_t*>(host_.data() + begins_offset_);
    *table = {reinterpret_cast<const void*>(memory_->data()), 0, elements};
    kernels::IndexChunks({table, 1}, elements, begins);
    table_ = {table, begins, 1};
    return {};
  }

  ~Rehearsal() {
    if (device_ == nullptr) return;
    const kernels::CurrentDevice current(*device_);
    if (stream_.get() != nullptr) device_->driver().StreamSynchronize(stream_.get());
    kernels_.Unload();
    memory_.reset();
    stream_ = {};
  }

  CudaStatus Measure(DType dtype, DType slot_dtype, double* seconds) const {
    const kernels::CurrentDevice current(*device_);
    const kernels::CudaDriver& driver = device_->driver();
    const CudaPointer slot = memory_->data() + slot_offset_;
    const kernels::PackArguments pack{.table = table_,
                                      .dtype = dtype,
                                      .slot = {reinterpret_cast<void*>(slot), slot_dtype},
                                      .elements = elements_,
                                      .chunk_sums = reinterpret_cast<double*>(memory_->data() + sums_offset_)};
    const uint64_t bytes = elements_ * kernels::DTypeBytes(slot_dtype);
    std::vector<double> rounds;
    for (size_t round = 0; round < kRounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      CudaStatus status = kernels_.Pack(pack, stream_.get());
      if (status.ok()) {
        status = driver.Status(driver.MemcpyDtoHAsync(host_.data() + gradient_offset_, slot, bytes, stream_.get()),
                               "copying");
      }
      if (status.ok()) status = driver.Status(driver.StreamSynchronize(stream_.get()), "measuring casts");
      if (!status.ok()) return status;
      rounds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
    *seconds = rounds[kRounds / 2];
    return {};
  }

 private:
  uint64_t elements_ = 0;
  uint64_t slot_offset_ = 0, sums_offset_ = 0;        // on the GPU, where the gradient is first
  uint64_t begins_offset_ = 0, gradient_offset_ = 0;  // on the host, where the table is
  kernels::PackTable table_{};
  std::shared_ptr<const kernels::GpuDevice> device_;
  kernels::CudaKernels kernels_;
  kernels::OwnedStream stream_;
  std::unique_ptr<kernels::SharedGpuMemory> memory_;
  kernels::PinnedMemory host_;
};

}  // namespace

Status MeasureCast(int ordinal, DType dtype, uint64_t elements, CastSeconds* seconds) {
  if (elements == 0) return Error(Code::kInvalidArgument, "a bucket of 0 elements cannot be measured");
  Rehearsal rehearsal;
  CudaStatus status = rehearsal.Open(ordinal, dtype, elements);
  if (status.ok()) status = rehearsal.Measure(dtype, dtype, &seconds->fused);
  if (status.ok()) status = rehearsal.Measure(dtype, DType::kFloat32, &seconds->gpu_fp32);
  return FromCuda(status);
}

}  // namespace superoffload::client
