// The pack kernel alone, for Python: a library that launches it on a stream of the caller's, as often as wanted.
// Nothing is copied and nobody waits. One at a time; not thread-safe.
//
//   pack_open(elements)         of a bucket, on GPU 0, in its primary context. Null, or what is wrong
//   pack_launch(width, stream)  packs the bucket of bf16 into a slot of as wide elements (2 or 4 bytes). Null, or ...
//   pack_close()                what was launched has run
#include <memory>
#include <string>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/gpu/pinned_memory.h"
#include "kernels/gpu/shared_gpu_memory.h"

namespace {

using namespace superoffload::kernels;

// As memory of its own would be.
constexpr uint64_t Aligned(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

class Bucket {
 public:
  CudaStatus Open(uint64_t elements) {
    elements_ = elements;
    if (CudaStatus status = GpuDevice::Open(0, &device_); !status.ok()) return status;
    const CurrentDevice current(*device_);
    if (CudaStatus status = kernels_.Load(device_->driver(), device_->handle()); !status.ok()) return status;
    slot_ = Aligned(elements * DTypeBytes(DType::kBFloat16));
    sums_ = slot_ + Aligned(elements * DTypeBytes(DType::kFloat32));
    const uint64_t chunks = (elements + kChunkElements - 1) / kChunkElements;
    if (CudaStatus status = SharedGpuMemory::Allocate(device_, sums_ + chunks * sizeof(double), &memory_);
        !status.ok()) {
      return status;
    }
    const size_t table_bytes = sizeof(PackedTensor) + (chunks + 1) * sizeof(uint32_t);
    if (CudaStatus status = PinnedMemory::Allocate(device_, table_bytes, &table_); !status.ok()) return status;
    *tensor() = {reinterpret_cast<const void*>(memory_->data()), 0, elements};
    IndexChunks({tensor(), 1}, elements, chunk_begins());
    return {};
  }

  ~Bucket() {
    if (device_ == nullptr) return;
    const CurrentDevice current(*device_);
    kernels_.Unload();
    memory_.reset();
  }

  CudaStatus Pack(DType slot, CudaStream stream) const {
    const CurrentDevice current(*device_);
    return kernels_.Pack({.table = {tensor(), chunk_begins(), 1},
                          .dtype = DType::kBFloat16,
                          .slot = {reinterpret_cast<void*>(memory_->data() + slot_), slot},
                          .elements = elements_,
                          .chunk_sums = reinterpret_cast<double*>(memory_->data() + sums_)},
                         stream);
  }

 private:
  PackedTensor* tensor() const { return reinterpret_cast<PackedTensor*>(table_.data()); }
  uint32_t* chunk_begins() const { return reinterpret_cast<uint32_t*>(table_.data() + sizeof(PackedTensor)); }

  uint64_t elements_ = 0;
  uint64_t slot_ = 0, sums_ = 0;  // offsets on the GPU, where the gradient is first
  std::shared_ptr<const GpuDevice> device_;
  CudaKernels kernels_;
  std::unique_ptr<SharedGpuMemory> memory_;
  PinnedMemory table_;
};

std::unique_ptr<Bucket> bucket;

const char* Said(const CudaStatus& status) {
  static std::string message;
  message = status.message;
  return status.ok() ? nullptr : message.c_str();
}

}  // namespace

extern "C" {

const char* pack_open(uint64_t elements) {
  bucket = std::make_unique<Bucket>();
  return Said(bucket->Open(elements));
}

const char* pack_launch(unsigned width, void* stream) {
  return Said(bucket->Pack(width == DTypeBytes(DType::kFloat32) ? DType::kFloat32 : DType::kBFloat16,
                           static_cast<CudaStream>(stream)));
}

void pack_close() { bucket.reset(); }

}  // extern "C"
