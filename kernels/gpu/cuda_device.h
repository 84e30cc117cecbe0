// One GPU as this process uses it, and what lives in its context.
#ifndef SUPEROFFLOAD_KERNELS_GPU_CUDA_DEVICE_H_
#define SUPEROFFLOAD_KERNELS_GPU_CUDA_DEVICE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gpu/cuda_driver.h"

namespace superoffload::kernels {

// The device's primary context: PyTorch's and JAX's, too, so that their pointers and streams are ours.
class GpuDevice {
 public:
  // `ordinal` counts what CUDA_VISIBLE_DEVICES leaves to this process. UNAVAILABLE: no driver, or no GPU.
  static CudaStatus Open(int ordinal, std::shared_ptr<const GpuDevice>* device);

  // With these functions for a driver's, which outlive it.
  static CudaStatus OpenWith(const CudaDriver& driver, int ordinal, std::shared_ptr<const GpuDevice>* device);

  // NOT_FOUND: this process does not see it.
  static CudaStatus OpenByUuid(const CudaUuid& uuid, std::shared_ptr<const GpuDevice>* device);

  ~GpuDevice();
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  const CudaDriver& driver() const { return driver_; }
  CudaDevice handle() const { return device_; }
  CudaContext context() const { return context_; }
  const CudaUuid& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }

  // Whether a boolean CUdevice_attribute holds.
  bool Has(int attribute) const;

  // The other GPUs, of those that this process sees, whose kernels and copies can reach this one's memory.
  std::vector<CudaDevice> Peers() const;

  // Whether this process uses the GPU by now: it has its primary context, as frameworks do from their first use of it
  // on.
  bool Uses(CudaDevice device) const;

 private:
  GpuDevice(const CudaDriver& driver, CudaDevice device) : driver_(driver), device_(device) {}
  static CudaStatus OpenHandle(const CudaDriver& driver, CudaDevice handle, std::shared_ptr<const GpuDevice>* device);

  const CudaDriver& driver_;
  const CudaDevice device_;
  CudaContext context_ = nullptr;
  CudaUuid uuid_{};
  std::string name_;
};

// "GPU-8f6c...", as nvidia-smi prints it and CUDA_VISIBLE_DEVICES takes it.
std::string UuidText(const CudaUuid& uuid);

// Makes the context current for this thread while it lives. Meanwhile a capture of another stream, of which nothing of
// ours becomes a part, neither forbids this thread to wait or to allocate, nor is lost by it (CUresult 900).
class CurrentDevice {
 public:
  explicit CurrentDevice(const GpuDevice& device) : driver_(device.driver()) {
    driver_.ThreadExchangeStreamCaptureMode(&capture_mode_);
    driver_.CtxPushCurrent(device.context());
  }
  ~CurrentDevice() {
    CudaContext popped;
    driver_.CtxPopCurrent(&popped);
    driver_.ThreadExchangeStreamCaptureMode(&capture_mode_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const CudaDriver& driver_;
  int capture_mode_ = kCudaCaptureModeRelaxed;  // and then the one before
};

// A stream or an event. The device must be current when it is made and outlive it.
template <typename Handle, int (*CudaDriver::*kDestroy)(Handle)>
class CudaObject {
 public:
  CudaObject() = default;
  CudaObject(const CudaDriver& driver, Handle handle) : driver_(&driver), handle_(handle) {}
  CudaObject(CudaObject&& other) noexcept : driver_(other.driver_), handle_(std::exchange(other.handle_, nullptr)) {}
  CudaObject& operator=(CudaObject&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaObject() {
    if (handle_ != nullptr) (driver_->*kDestroy)(handle_);
  }
  Handle get() const { return handle_; }

 private:
  const CudaDriver* driver_ = nullptr;
  Handle handle_ = nullptr;
};
using OwnedStream = CudaObject<CudaStream, &CudaDriver::StreamDestroy>;
using OwnedEvent = CudaObject<CudaEvent, &CudaDriver::EventDestroy>;

// FAILED_PRECONDITION: what is launched on the stream goes into a CUDA graph, or the default stream cannot be used
// because another stream's does.
CudaStatus CheckNotCapturing(const GpuDevice& device, CudaStream stream);

// `waiting` waits for all that was launched on a stream of the trainer's. `event` is recorded there, and may be again
// at once. Errors as CheckNotCapturing.
CudaStatus WaitForStream(const GpuDevice& device, CudaStream waiting, CudaStream trainers, CudaEvent event);

// A stream that does not wait for the default stream.
CudaStatus MakeStream(const GpuDevice& device, OwnedStream* stream);

// Without timing; a thread that waits for it sleeps.
CudaStatus MakeEvent(const GpuDevice& device, OwnedEvent* event);

// With timing.
CudaStatus MakeTimingEvent(const GpuDevice& device, OwnedEvent* event);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_CUDA_DEVICE_H_
