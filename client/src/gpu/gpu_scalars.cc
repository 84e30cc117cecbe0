#include "client/src/gpu/gpu_scalars.h"

#include <cstring>

#include "client/src/gpu/gpu_status.h"

namespace superoffload::client {

using kernels::CudaPointer;
using kernels::CudaStream;
using kernels::CurrentDevice;

GpuScalars::~GpuScalars() {
  const CurrentDevice current(*device_);
  (void)WaitWritten();  // an error is one of the driver's, which has stopped copying
}

Status GpuScalars::WaitWritten() const {
  if (taken_.get() == nullptr) return {};
  return FromCuda(device_->driver().Status(device_->driver().EventSynchronize(taken_.get()),
                                           "waiting for numbers that were copied to the GPU"));
}

Status GpuScalars::Fit(std::span<const SmallCopy> copies, Buffer* buffer) const {
  size_t bytes = 0;
  for (const SmallCopy& copy : copies) bytes += copy.bytes;
  if (bytes <= buffer->bytes) return {};
  kernels::PinnedMemory memory;
  if (Status status = FromCuda(kernels::PinnedMemory::Allocate(device_, bytes, &memory)); !status.ok()) return status;
  *buffer = {std::move(memory), bytes};
  return {};
}

Status GpuScalars::Read(std::span<const SmallCopy> copies, CudaStream stream) {
  const CurrentDevice current(*device_);
  const kernels::CudaDriver& driver = device_->driver();
  if (Status status = Fit(copies, &read_); !status.ok()) return status;
  const char* const what = "copying numbers of XLA's from the GPU";
  kernels::CudaStatus status;
  std::byte* to = read_.memory.data();
  for (const SmallCopy& copy : copies) {
    if (copy.bytes > 0 && status.ok()) {
      status = driver.Status(driver.MemcpyDtoHAsync(to, reinterpret_cast<CudaPointer>(copy.device), copy.bytes, stream),
                             what);
    }
    to += copy.bytes;
  }
  // Also after an error: what was issued before it writes to memory that the next call uses.
  const kernels::CudaStatus done = driver.Status(driver.StreamSynchronize(stream), what);
  if (status.ok()) status = done;
  if (!status.ok()) return FromCuda(status);
  const std::byte* from = read_.memory.data();
  for (const SmallCopy& copy : copies) {
    if (copy.bytes > 0) std::memcpy(copy.host, from, copy.bytes);
    from += copy.bytes;
  }
  return {};
}

Status GpuScalars::Write(std::span<const SmallCopy> copies, CudaStream stream) {
  const CurrentDevice current(*device_);
  const kernels::CudaDriver& driver = device_->driver();
  if (Status status = WaitWritten(); !status.ok()) return status;
  if (Status status = Fit(copies, &written_); !status.ok()) return status;
  if (taken_.get() == nullptr) {
    if (Status status = FromCuda(kernels::MakeEvent(*device_, &taken_)); !status.ok()) return status;
  }
  const char* const what = "copying numbers for XLA to the GPU";
  kernels::CudaStatus status;
  std::byte* from = written_.memory.data();
  for (const SmallCopy& copy : copies) {
    if (copy.bytes > 0 && status.ok()) {
      std::memcpy(from, copy.host, copy.bytes);
      status = driver.Status(
          driver.MemcpyHtoDAsync(reinterpret_cast<CudaPointer>(copy.device), from, copy.bytes, stream), what);
    }
    from += copy.bytes;
  }
  const kernels::CudaStatus recorded = driver.Status(driver.EventRecord(taken_.get(), stream), what);
  return FromCuda(status.ok() ? recorded : status);
}

}  // namespace superoffload::client
