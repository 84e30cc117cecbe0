#include "client/src/gpu/gradient_packer.h"

#include <algorithm>
#include <utility>

#include "client/src/gpu/gpu_status.h"
#include "kernels/base/check.h"

namespace superoffload::client {
namespace {

using kernels::CudaPointer;
using kernels::CudaStream;
using kernels::PackedTensor;

uint64_t Square(uint64_t n) { return n * n; }

template <typename T>
T* DeviceData(CudaPointer pointer) {
  return reinterpret_cast<T*>(pointer);
}

}  // namespace

Status GradientPacker::Open(std::shared_ptr<const kernels::GpuDevice> device, const GpuLayout& layout, CudaPointer gpu,
                            CudaStream stream) {
  device_ = std::move(device);
  layout_ = layout;
  gpu_ = gpu;
  stream_ = stream;
  if (Status status = FromCuda(kernels_.Load(device_->driver(), device_->handle())); !status.ok()) return status;
  for (kernels::OwnedEvent* event : {&ready_, &packed_}) {
    if (Status status = FromCuda(kernels::MakeEvent(*device_, event)); !status.ok()) return status;
  }
  const uint64_t tables_bytes = layout.slots.count * layout.most_tensors * sizeof(PackedTensor);
  const uint64_t begins_bytes = layout.slots.count * (layout.most_chunks + 1) * sizeof(uint32_t);
  kernels::CudaStatus status = kernels::PinnedMemory::Allocate(device_, tables_bytes, &tables_);
  if (status.ok()) status = kernels::PinnedMemory::Allocate(device_, begins_bytes, &chunk_begins_);
  return FromCuda(status);
}

GradientPacker::~GradientPacker() {
  if (device_ == nullptr) return;
  const kernels::CurrentDevice current(*device_);
  device_->driver().StreamSynchronize(stream_);
  kernels_.Unload();
  ready_ = {};
  packed_ = {};
}

Status GradientPacker::Check(uint32_t bucket, uint64_t elements, std::span<const BucketTensor> tensors) const {
  if (tensors.size() > layout_.most_tensors) {
    return Error(Code::kInvalidArgument, tensors.size(), " tensors for bucket ", bucket, ", but parts of at most ",
                 layout_.most_tensors, " parameters lie in one");
  }
  uint64_t end = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const BucketTensor& tensor = tensors[i];
    if (tensor.first < end || tensor.elements > elements - std::min(tensor.first, elements)) {
      return Error(Code::kInvalidArgument, "tensor ", i, " of bucket ", bucket,
                   " overlaps the one before it or the end of the bucket; sort them and keep them inside");
    }
    end = tensor.first + tensor.elements;
  }
  return {};
}

Status GradientPacker::After(CudaStream stream) {
  if (Status status = WaitFor(stream, stream_); !status.ok()) return status;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  return {};
}

Status GradientPacker::AfterAll() {
  for (const CudaStream stream : streams_) {
    if (Status status = WaitFor(stream, stream_); !status.ok()) return status;
  }
  streams_.clear();
  return {};
}

Status GradientPacker::WaitFor(CudaStream stream, CudaStream side_stream) {
  return FromCuda(kernels::WaitForStream(*device_, side_stream, stream, ready_.get()));
}

// The slot's table is read by the kernel that fills the slot, which is over before the slot is free again.
kernels::PackTable GradientPacker::WriteTable(const GpuBucket& bucket, uint32_t slot,
                                              std::span<const BucketTensor> tensors) {
  SUPEROFFLOAD_CHECK_LT(slot, layout_.slots.count);
  SUPEROFFLOAD_CHECK_LE(tensors.size(), layout_.most_tensors);
  SUPEROFFLOAD_CHECK_LE(bucket.chunks(), layout_.most_chunks);
  auto* const table = reinterpret_cast<PackedTensor*>(tables_.data()) + slot * layout_.most_tensors;
  auto* const begins = reinterpret_cast<uint32_t*>(chunk_begins_.data()) + slot * (layout_.most_chunks + 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    table[i] = {DeviceData<const void>(tensors[i].data), tensors[i].first, tensors[i].elements};
  }
  kernels::IndexChunks({table, tensors.size()}, bucket.elements, begins);
  return {table, begins, static_cast<uint32_t>(tensors.size())};
}

kernels::PackArguments GradientPacker::Arguments(const GpuBucket& bucket, uint32_t slot,
                                                 const kernels::PackTable& table, kernels::DType dtype, void* to,
                                                 Pass pass) const {
  return {.table = table,
          .dtype = dtype,
          .slot = {to, bucket.gradient_dtype},
          .elements = bucket.elements,
          .chunk_sums = DeviceData<double>(gpu_ + layout_.slots.sums_of(slot)),
          .adds = pass.adds,
          .gap = pass.last ? 0.0f : -0.0f};
}

Status GradientPacker::Pack(const GpuBucket& bucket, uint32_t slot, std::span<const BucketTensor> tensors,
                            kernels::DType dtype, void* to, Pass pass) {
  const kernels::PackTable table = WriteTable(bucket, slot, tensors);
  return FromCuda(kernels_.Pack(Arguments(bucket, slot, table, dtype, to, pass), stream_));
}

Status GradientPacker::WaitPacked(CudaStream stream) {
  const kernels::CudaDriver& driver = device_->driver();
  if (Status status = FromCuda(driver.Status(driver.EventRecord(packed_.get(), stream_), "recording an event"));
      !status.ok()) {
    return status;
  }
  return FromCuda(driver.Status(driver.StreamWaitEvent(stream, packed_.get(), 0), "waiting for a slot"));
}

Status GradientPacker::Synchronize() const {
  const kernels::CudaDriver& driver = device_->driver();
  return FromCuda(driver.Status(driver.StreamSynchronize(stream_), "packing gradients"));
}

Status GradientPacker::Multiply(uint32_t slot, CudaStream stream) {
  constexpr uint64_t kMatrices = 3;
  const CudaPointer place = gpu_ + layout_.slots.slot_offset(slot);
  uint32_t n = kernels::kProductTile;  // the least slot holds so much
  while (kMatrices * Square(n + kernels::kProductTile) * sizeof(float) <= layout_.slots.bytes) {
    n += kernels::kProductTile;
  }
  const uint64_t bytes = Square(n) * sizeof(float);
  SUPEROFFLOAD_CHECK_LE(kMatrices * bytes, layout_.slots.bytes);
  return FromCuda(kernels_.Product({.a = DeviceData<const float>(place),
                                    .b = DeviceData<const float>(place + bytes),
                                    .c = DeviceData<float>(place + 2 * bytes),
                                    .n = n},
                                   stream));
}

}  // namespace superoffload::client
