// A stage's event is recorded anew only after the stage was packed, and each copy into the stage waits for the latest:
// so no copy overtakes the kernel that reads what was there before.
#include "client/src/xla/gpu_pieces.h"

#include <utility>

#include "client/src/gpu/gpu_status.h"
#include "kernels/check.h"

namespace superoffload::client {

using kernels::CudaPointer;
using kernels::CudaStream;
using kernels::CurrentDevice;

GpuPieces::GpuPieces(GpuPlane* plane, uint64_t stage_bytes)
    : plane_(plane),
      device_(plane->device()),
      stage_bytes_(stage_bytes),
      stream_(plane->pack_stream()),
      scalars_(plane->device()) {}

GpuPieces::~GpuPieces() {
  WaitPacked();
  const CurrentDevice current(*device_);
  for (const auto& [stream, copied] : copied_) driver().EventSynchronize(copied.get());
  copied_.clear();  // while the device is current
  for (auto& [bucket, stage] : open_) driver().MemFree(stage.memory);
  for (StageMemory& stage : free_) driver().MemFree(stage.memory);
  open_.clear();
  free_.clear();
}

Status GpuPieces::Use(CudaStream stream) {
  if (Status status = plane_->CheckStream(stream); !status.ok()) return status;
  stream_ = stream;
  return {};
}

void GpuPieces::WaitPacked() const {
  if (plane_->ended()) return;  // so it has been
  const CurrentDevice current(*device_);
  driver().StreamSynchronize(plane_->pack_stream());
}

Status GpuPieces::Allocate(StageMemory* stage) {
  if (Status status = FromCuda(kernels::MakeEvent(*device_, &stage->packed)); !status.ok()) return status;
  return FromCuda(driver().Status(driver().MemAlloc(&stage->memory, stage_bytes_),
                                  "allocating GPU memory for gradients of a bucket (XLA_PYTHON_CLIENT_MEM_FRACTION "
                                  "says how much JAX leaves)"));
}

Status GpuPieces::Open(uint32_t bucket, StageMemory** stage) {
  auto found = open_.find(bucket);
  if (found == open_.end()) {
    StageMemory opened;
    if (!free_.empty()) {
      opened = std::move(free_.front());
      free_.pop_front();
    } else if (Status status = Allocate(&opened); !status.ok()) {
      return status;
    }
    found = open_.emplace(bucket, std::move(opened)).first;
  }
  *stage = &found->second;
  return {};
}

Status GpuPieces::Stage(const BucketPart& part, uint64_t element_bytes, const void* from) {
  SUPEROFFLOAD_CHECK_LE((part.first + part.elements) * element_bytes, stage_bytes_);
  const CurrentDevice current(*device_);
  StageMemory* stage = nullptr;
  if (Status status = Open(part.bucket, &stage); !status.ok()) return status;
  if (Status status = FromCuda(driver().Status(driver().StreamWaitEvent(stream_, stage->packed.get(), 0),
                                               "waiting for a gradient to be packed"));
      !status.ok()) {
    return status;
  }
  return FromCuda(driver().Status(
      driver().MemcpyDtoDAsync(stage->memory + part.first * element_bytes, reinterpret_cast<CudaPointer>(from),
                               part.elements * element_bytes, stream_),
      "copying a gradient"));
}

Status GpuPieces::Staged() { return plane_->PackAfter(stream_); }

Status GpuPieces::Submit(const superoffload_ring_entry& entry, std::span<superoffload_tensor> tensors,
                         kernels::DType dtype) {
  const auto stage = open_.find(entry.index);
  for (superoffload_tensor& tensor : tensors) {
    if (tensor.data != 0) continue;
    SUPEROFFLOAD_CHECK(stage != open_.end(), "bucket ", entry.index);
    tensor.data = stage->second.memory + tensor.first * kernels::DTypeBytes(dtype);
  }
  if (Status status = plane_->SubmitGradient(entry, tensors, dtype, stream_); !status.ok()) return status;
  return Release(entry.index);
}

// The pack stream has been given what uses the bucket's stage.
Status GpuPieces::Release(uint32_t bucket) {
  const auto stage = open_.find(bucket);
  if (stage == open_.end()) return {};
  const CurrentDevice current(*device_);
  const Status status = FromCuda(driver().Status(
      driver().EventRecord(stage->second.packed.get(), plane_->pack_stream()), "recording an event"));
  free_.push_back(std::move(stage->second));
  open_.erase(stage);
  return status;
}

void GpuPieces::Drop() {
  while (!open_.empty()) {
    const uint32_t bucket = open_.begin()->first;
    if (plane_->ended()) {
      free_.push_back(std::move(open_.begin()->second));
      open_.erase(bucket);
    } else {
      (void)Release(bucket);  // an error is one of the driver's, which every later call has
    }
  }
}

Status GpuPieces::Copy(void* to, CudaPointer from, uint64_t bytes) {
  const CurrentDevice current(*device_);
  kernels::OwnedEvent& copied = copied_[stream_];
  kernels::CudaStatus status = copied.get() == nullptr ? MakeEvent(*device_, &copied) : kernels::CudaStatus{};
  if (status.ok()) {
    status = driver().Status(driver().MemcpyDtoDAsync(reinterpret_cast<CudaPointer>(to), from, bytes, stream_),
                             "copying what XLA has asked for");
  }
  if (status.ok()) status = driver().Status(driver().EventRecord(copied.get(), stream_), "recording an event");
  return FromCuda(status);
}

}  // namespace superoffload::client
