#include "kernels/gpu/cuda_device.h"

#include <cstdio>
#include <cstring>

namespace superoffload::kernels {
namespace {

constexpr int kNotFound = 5, kFailedPrecondition = 9;  // canonical
constexpr size_t kNameBytes = 128;

}  // namespace

CudaStatus GpuDevice::Open(int ordinal, std::shared_ptr<const GpuDevice>* device) {
  CudaStatus status;
  const CudaDriver* const driver = CudaDriver::Load(&status);
  return driver == nullptr ? status : OpenWith(*driver, ordinal, device);
}

CudaStatus GpuDevice::OpenWith(const CudaDriver& driver, int ordinal, std::shared_ptr<const GpuDevice>* device) {
  CudaDevice handle = 0;
  if (CudaStatus status = driver.Status(driver.DeviceGet(&handle, ordinal), "opening GPU " + std::to_string(ordinal));
      !status.ok()) {
    return status;
  }
  return OpenHandle(driver, handle, device);
}

CudaStatus GpuDevice::OpenByUuid(const CudaUuid& uuid, std::shared_ptr<const GpuDevice>* device) {
  CudaStatus status;
  const CudaDriver* const driver = CudaDriver::Load(&status);
  if (driver == nullptr) return status;
  int count = 0;
  if (status = driver->Status(driver->DeviceGetCount(&count), "counting GPUs"); !status.ok()) return status;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaDevice handle = 0;
    CudaUuid found{};
    if (driver->DeviceGet(&handle, ordinal) != 0 || driver->DeviceGetUuid(&found, handle) != 0) continue;
    if (found == uuid) return OpenHandle(*driver, handle, device);
  }
  return {kNotFound, "no " + UuidText(uuid) + " among the " + std::to_string(count) +
                         " GPUs that this process sees; give it that GPU (CUDA_VISIBLE_DEVICES, DeviceAllow=, the "
                         "container's devices; a MIG instance counts as a GPU of its own)"};
}

CudaStatus GpuDevice::OpenHandle(const CudaDriver& driver, CudaDevice handle,
                                 std::shared_ptr<const GpuDevice>* device) {
  std::shared_ptr<GpuDevice> opened(new GpuDevice(driver, handle));
  char name[kNameBytes] = "";
  if (CudaStatus status = driver.Status(driver.DeviceGetName(name, kNameBytes, handle), "asking for a GPU's name");
      !status.ok()) {
    return status;
  }
  opened->name_.assign(name, ::strnlen(name, kNameBytes));
  if (CudaStatus status = driver.Status(driver.DeviceGetUuid(&opened->uuid_, handle), "asking for a GPU's UUID");
      !status.ok()) {
    return status;
  }
  if (CudaStatus status = driver.Status(driver.DevicePrimaryCtxRetain(&opened->context_, handle),
                                        "opening the context of " + opened->name_);
      !status.ok()) {
    return status;
  }
  *device = std::move(opened);
  return {};
}

GpuDevice::~GpuDevice() {
  if (context_ != nullptr) driver_.DevicePrimaryCtxRelease(device_);
}

bool GpuDevice::Has(int attribute) const {
  int value = 0;
  return driver_.DeviceGetAttribute(&value, attribute, device_) == 0 && value != 0;
}

std::vector<CudaDevice> GpuDevice::Peers() const {
  std::vector<CudaDevice> peers;
  int count = 0;
  if (driver_.DeviceGetCount(&count) != 0) return peers;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaDevice peer = 0;
    int can = 0;
    if (driver_.DeviceGet(&peer, ordinal) != 0 || peer == device_) continue;
    if (driver_.DeviceCanAccessPeer(&can, peer, device_) == 0 && can != 0) peers.push_back(peer);
  }
  return peers;
}

bool GpuDevice::Uses(CudaDevice device) const {
  unsigned flags = 0;
  int active = 0;
  return driver_.DevicePrimaryCtxGetState(device, &flags, &active) == 0 && active != 0;
}

std::string UuidText(const CudaUuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += hex;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
  }
  return text;
}

CudaStatus CheckNotCapturing(const GpuDevice& device, CudaStream stream) {
  int capture = kCudaStreamNotCapturing;
  const CudaDriver& driver = device.driver();
  if (CudaStatus status = driver.Status(driver.StreamIsCapturing(stream, &capture), "using the trainer's stream");
      !status.ok()) {
    return status;
  }
  if (capture == kCudaStreamNotCapturing) return {};
  return {kFailedPrecondition,
          "the trainer's stream is being captured into a CUDA graph, and a replay would submit and await nothing; "
          "capture nothing while a step is submitted, ended or awaited"};
}

CudaStatus WaitForStream(const GpuDevice& device, CudaStream waiting, CudaStream trainers, CudaEvent event) {
  const CudaDriver& driver = device.driver();
  if (CudaStatus status = CheckNotCapturing(device, trainers); !status.ok()) return status;
  if (CudaStatus status = driver.Status(driver.EventRecord(event, trainers), "recording an event"); !status.ok()) {
    return status;
  }
  return driver.Status(driver.StreamWaitEvent(waiting, event, 0), "waiting for the trainer's stream");
}

CudaStatus MakeStream(const GpuDevice& device, OwnedStream* stream) {
  CudaStream made = nullptr;
  const CudaDriver& driver = device.driver();
  CudaStatus status = driver.Status(driver.StreamCreate(&made, kCudaStreamNonBlocking), "making a stream");
  if (status.ok()) *stream = OwnedStream(driver, made);
  return status;
}

namespace {

CudaStatus MakeEventWith(const GpuDevice& device, unsigned flags, OwnedEvent* event) {
  CudaEvent made = nullptr;
  const CudaDriver& driver = device.driver();
  CudaStatus status = driver.Status(driver.EventCreate(&made, flags), "making an event");
  if (status.ok()) *event = OwnedEvent(driver, made);
  return status;
}

}  // namespace

CudaStatus MakeEvent(const GpuDevice& device, OwnedEvent* event) {
  return MakeEventWith(device, kCudaEventBlockingSync | kCudaEventDisableTiming, event);
}

CudaStatus MakeTimingEvent(const GpuDevice& device, OwnedEvent* event) {
  return MakeEventWith(device, kCudaEventBlockingSync, event);
}

}  // namespace superoffload::kernels
