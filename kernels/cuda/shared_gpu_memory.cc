#include "kernels/cuda/shared_gpu_memory.h"

#include <string>

namespace superoffload::kernels {
namespace {

constexpr int kInvalidArgument = 3;  // canonical

// Small allocations share a block, and a legacy handle opens the whole block.
constexpr uint64_t kBlockBytes = 2u << 20;

CudaAllocationProperties Properties(const GpuDevice& device) {
  CudaAllocationProperties properties;
  properties.location.id = device.handle();
  return properties;
}

}  // namespace

CudaStatus SharedGpuMemory::Allocate(std::shared_ptr<const GpuDevice> device, uint64_t bytes, Sharing sharing,
                                     std::unique_ptr<SharedGpuMemory>* memory) {
  const CudaDriver& driver = device->driver();
  const CudaAllocationProperties properties = Properties(*device);
  uint64_t granularity = kBlockBytes;
  if (sharing == Sharing::kDescriptor) {
    constexpr int kMinimum = 0;
    if (CudaStatus status = driver.Status(driver.MemGetAllocationGranularity(&granularity, &properties, kMinimum),
                                          "asking for the granularity of GPU memory");
        !status.ok()) {
      return status;
    }
  }
  bytes = (bytes + granularity - 1) / granularity * granularity;
  const std::string what = "allocating " + std::to_string(bytes) + " bytes of GPU memory";
  std::unique_ptr<SharedGpuMemory> made(new SharedGpuMemory(std::move(device), sharing, bytes));
  if (sharing == Sharing::kDescriptor) {
    if (CudaStatus status = driver.Status(driver.MemCreate(&made->allocation_, bytes, &properties, 0), what);
        !status.ok()) {
      return status;
    }
    if (CudaStatus status = made->Map(); !status.ok()) return status;
  } else if (CudaStatus status = driver.Status(driver.MemAlloc(&made->data_, bytes), what); !status.ok()) {
    return status;
  }
  *memory = std::move(made);
  return {};
}

CudaStatus SharedGpuMemory::Import(std::shared_ptr<const GpuDevice> device, const SharedGpuMemoryTicket& ticket,
                                   int descriptor, std::unique_ptr<SharedGpuMemory>* memory) {
  const CudaDriver& driver = device->driver();
  std::unique_ptr<SharedGpuMemory> made(new SharedGpuMemory(std::move(device), ticket.sharing, ticket.bytes));
  made->imported_ = true;
  if (ticket.sharing == Sharing::kDescriptor) {
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    if (CudaStatus status =
            driver.Status(driver.MemImportFromShareableHandle(&made->allocation_, handle, kCudaPosixDescriptor),
                          "importing the trainer's GPU memory");
        !status.ok()) {
      return status;
    }
    if (CudaStatus status = made->Map(); !status.ok()) return status;
  } else {
    CudaPointer base = 0;
    if (CudaStatus status = driver.Status(driver.IpcOpenMemHandle(&base, ticket.handle, kCudaIpcLazyPeerAccess),
                                          "opening the trainer's GPU memory");
        !status.ok()) {
      return status;
    }
    made->offset_ = ticket.offset;
    made->data_ = base + ticket.offset;
    // What the exporter says is not to be believed.
    size_t opened = 0;
    if (CudaStatus status = driver.Status(driver.MemGetAddressRange(nullptr, &opened, base), "measuring GPU memory");
        !status.ok()) {
      return status;
    }
    if (ticket.offset > opened || ticket.bytes > opened - ticket.offset) {
      return {kInvalidArgument, "the trainer's GPU memory has " + std::to_string(opened) + " bytes, fewer than its " +
                                    std::to_string(ticket.bytes) + " at " + std::to_string(ticket.offset)};
    }
  }
  *memory = std::move(made);
  return {};
}

CudaStatus SharedGpuMemory::Map() {
  const CudaDriver& driver = device_->driver();
  if (CudaStatus status =
          driver.Status(driver.MemAddressReserve(&data_, bytes_, 0, 0, 0), "reserving addresses for GPU memory");
      !status.ok()) {
    return status;
  }
  reserved_ = true;
  const int mapped = driver.MemMap(data_, bytes_, 0, allocation_, 0);
  if (imported_ && mapped == kCudaInvalidValue) {  // what the exporter says is not to be believed
    return {kInvalidArgument, "the trainer's GPU memory does not have the " + std::to_string(bytes_) +
                                  " bytes that it says"};
  }
  if (CudaStatus status = driver.Status(mapped, "mapping GPU memory"); !status.ok()) return status;
  mapped_ = true;
  CudaAccess access;
  access.location.id = device_->handle();
  return driver.Status(driver.MemSetAccess(data_, bytes_, &access, 1), "opening access to GPU memory");
}

SharedGpuMemory::~SharedGpuMemory() {
  const CurrentDevice current(*device_);
  const CudaDriver& driver = device_->driver();
  if (sharing_ == Sharing::kDescriptor) {
    if (mapped_) driver.MemUnmap(data_, bytes_);
    if (reserved_) driver.MemAddressFree(data_, bytes_);
    if (allocation_ != 0) driver.MemRelease(allocation_);
  } else if (data_ != 0 && imported_) {
    driver.IpcCloseMemHandle(data_ - offset_);
  } else if (data_ != 0) {
    driver.MemFree(data_);
  }
}

CudaStatus SharedGpuMemory::Export(SharedGpuMemoryTicket* ticket, int* descriptor) const {
  const CudaDriver& driver = device_->driver();
  *ticket = {.sharing = sharing_, .handle = {}, .offset = 0, .bytes = bytes_};
  *descriptor = -1;
  if (sharing_ == Sharing::kDescriptor) {
    return driver.Status(driver.MemExportToShareableHandle(descriptor, allocation_, kCudaPosixDescriptor, 0),
                         "exporting GPU memory as a descriptor");
  }
  CudaPointer base = 0;
  if (CudaStatus status =
          driver.Status(driver.MemGetAddressRange(&base, nullptr, data_), "finding the block of GPU memory");
      !status.ok()) {
    return status;
  }
  ticket->offset = data_ - base;
  return driver.Status(driver.IpcGetMemHandle(&ticket->handle, data_), "exporting GPU memory");
}

}  // namespace superoffload::kernels
