// Invariant: `pieces_` are mapped one behind the other from `data_` on, but for those that were given back, and cover
// `backed_bytes_`.
#include "kernels/gpu/shared_gpu_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/base/check.h"

namespace superoffload::kernels {
namespace {

constexpr int kInvalidArgument = 3, kUnimplemented = 12;  // canonical

constexpr uint64_t kPlainBlockBytes = 2u << 20;
// Each piece costs a few calls of the driver and a descriptor.
constexpr uint64_t kLeastPieceBytes = 8u << 20;

uint64_t RoundUp(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

CudaAllocationProperties Properties(const GpuDevice& device, Export exports) {
  CudaAllocationProperties properties;
  properties.handle_types = exports == Export::kAsDescriptors ? kCudaPosixDescriptor : 0;
  properties.location.id = device.handle();
  return properties;
}

CudaStatus GetGranularity(const GpuDevice& device, Export exports, uint64_t* granularity) {
  const CudaAllocationProperties properties = Properties(device, exports);
  constexpr int kMinimum = 0;
  return device.driver().Status(device.driver().MemGetAllocationGranularity(granularity, &properties, kMinimum),
                                "asking for the granularity of GPU memory");
}

std::string Allocating(uint64_t bytes) { return "allocating " + std::to_string(bytes) + " bytes of GPU memory"; }

}  // namespace

SharedGpuMemory::SharedGpuMemory(std::shared_ptr<const GpuDevice> device, uint64_t bytes, uint64_t piece_bytes,
                                 Export exports)
    : device_(std::move(device)), bytes_(bytes), piece_bytes_(piece_bytes), exports_(exports), accesses_(1) {
  accesses_[0].location.id = device_->handle();
}

CudaStatus SharedGpuMemory::Allocate(std::shared_ptr<const GpuDevice> device, uint64_t bytes,
                                     std::unique_ptr<SharedGpuMemory>* memory) {
  const CudaDriver& driver = device->driver();
  bytes = RoundUp(bytes, kPlainBlockBytes);
  std::unique_ptr<SharedGpuMemory> made(new SharedGpuMemory(std::move(device), bytes, bytes, Export::kNever));
  made->plain_ = true;
  CudaStatus status = driver.Status(driver.MemAlloc(&made->data_, bytes), Allocating(bytes));
  if (!status.ok()) return status;
  made->backed_bytes_ = bytes;
  *memory = std::move(made);
  return {};
}

CudaStatus SharedGpuMemory::Reserve(std::shared_ptr<const GpuDevice> device, uint64_t bytes, uint64_t most_pieces,
                                    Export exports, const UnitRanges& units, std::unique_ptr<SharedGpuMemory>* memory) {
  uint64_t granularity = 0;
  if (CudaStatus status = GetGranularity(*device, exports, &granularity); !status.ok()) return status;
  bytes = RoundUp(bytes, granularity);
  if (units.count > 0 && kUnitGranule % granularity != 0) {
    return {kUnimplemented, "weights cannot stream on this GPU, whose memory is mapped in pieces of " +
                                std::to_string(granularity) + " bytes"};
  }
  SUPEROFFLOAD_CHECK(units.count == 0 ||
                         (units.offset >= bytes && units.offset % kUnitGranule == 0 && units.bytes % kUnitGranule == 0),
                     "units at ", units.offset, " of ", units.bytes, " bytes");
  const uint64_t piece_bytes =
      RoundUp(std::max(kLeastPieceBytes, (bytes + most_pieces - 1) / most_pieces), granularity);
  std::unique_ptr<SharedGpuMemory> made(new SharedGpuMemory(std::move(device), bytes, piece_bytes, exports));
  if (CudaStatus status = made->ReserveAddresses(units.count == 0 ? bytes : units.end()); !status.ok()) return status;
  if (units.count > 0) made->units_ = std::make_unique<UnitMemory>(made->device_, made->data_, units);
  made->closed_to_ = made->device_->Peers();
  *memory = std::move(made);
  return {};
}

CudaStatus SharedGpuMemory::Import(std::shared_ptr<const GpuDevice> device, uint64_t bytes, uint64_t piece_bytes,
                                   std::span<const int> descriptors, std::unique_ptr<SharedGpuMemory>* memory) {
  const uint64_t pieces = piece_bytes == 0 ? 0 : bytes / piece_bytes + (bytes % piece_bytes != 0 ? 1 : 0);
  if (bytes == 0 || pieces != descriptors.size()) {
    return {kInvalidArgument, "the trainer's GPU memory of " + std::to_string(bytes) + " bytes came with " +
                                  std::to_string(descriptors.size()) + " descriptors of " + std::to_string(pieces) +
                                  "; raise the limit on open files (LimitNOFILE=) of the daemon"};
  }
  const CudaDriver& driver = device->driver();
  uint64_t granularity = 0;
  if (CudaStatus status = GetGranularity(*device, Export::kAsDescriptors, &granularity); !status.ok()) return status;
  if (bytes % granularity != 0 || piece_bytes % granularity != 0) {
    return {kInvalidArgument, "the trainer's GPU memory of " + std::to_string(bytes) + " bytes in pieces of " +
                                  std::to_string(piece_bytes) + " is not of whole granules"};
  }
  std::unique_ptr<SharedGpuMemory> made(new SharedGpuMemory(std::move(device), bytes, piece_bytes, Export::kNever));
  if (CudaStatus status = made->ReserveAddresses(bytes); !status.ok()) return status;
  for (const int descriptor : descriptors) {
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
    CudaAllocation allocation = 0;
    CudaStatus status = driver.Status(driver.MemImportFromShareableHandle(&allocation, handle, kCudaPosixDescriptor),
                                      "importing the trainer's GPU memory");
    if (status.ok()) status = made->MapNext(allocation, /*imported=*/true);
    if (!status.ok()) return status;
  }
  *memory = std::move(made);
  return {};
}

CudaStatus SharedGpuMemory::ReserveAddresses(uint64_t bytes) {
  const CudaDriver& driver = device_->driver();
  CudaStatus status =
      driver.Status(driver.MemAddressReserve(&data_, bytes, 0, 0, 0), "reserving addresses for GPU memory");
  if (!status.ok()) data_ = 0;
  addresses_ = bytes;
  return status;
}

uint64_t SharedGpuMemory::NextPieceBytes() const { return std::min(piece_bytes_, bytes_ - backed_bytes_); }

CudaStatus SharedGpuMemory::Back(uint64_t end) {
  SUPEROFFLOAD_CHECK_LE(end, bytes_);
  std::lock_guard lock(mu_);
  const CudaDriver& driver = device_->driver();
  const CudaAllocationProperties properties = Properties(*device_, exports_);
  while (backed_bytes_ < end) {
    const uint64_t bytes = NextPieceBytes();
    CudaAllocation allocation = 0;
    CudaStatus status = driver.Status(driver.MemCreate(&allocation, bytes, &properties, 0), Allocating(bytes));
    if (status.ok()) status = MapNext(allocation, /*imported=*/false);
    if (!status.ok()) return status;
  }
  return {};
}

// The allocation is its own from now on.
CudaStatus SharedGpuMemory::MapNext(CudaAllocation allocation, bool imported) {
  const CudaDriver& driver = device_->driver();
  const uint64_t bytes = NextPieceBytes();
  const CudaPointer at = data_ + backed_bytes_;
  const int mapped = driver.MemMap(at, bytes, 0, allocation, 0);
  if (mapped != 0) {
    driver.MemRelease(allocation);
    if (imported && mapped == kCudaInvalidValue) {  // what the exporter says is not to be believed
      return {kInvalidArgument,
              "the trainer's GPU memory does not have the " + std::to_string(bytes_) + " bytes that it says"};
    }
    return driver.Status(mapped, "mapping GPU memory");
  }
  pieces_.push_back(allocation);
  backed_bytes_ += bytes;
  return driver.Status(driver.MemSetAccess(at, bytes, accesses_.data(), accesses_.size()),
                       "opening access to GPU memory");
}

CudaStatus SharedGpuMemory::OpenToPeers() {
  std::lock_guard lock(mu_);
  for (size_t i = 0; i < closed_to_.size();) {
    if (!device_->Uses(closed_to_[i])) {
      ++i;
      continue;
    }
    if (CudaStatus status = OpenTo(closed_to_[i]); !status.ok()) return status;
    closed_to_.erase(closed_to_.begin() + static_cast<ptrdiff_t>(i));
  }
  return {};
}

CudaStatus SharedGpuMemory::OpenTo(CudaDevice peer) {
  const CudaDriver& driver = device_->driver();
  CudaAccess access;
  access.location.id = peer;
  for (uint64_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i] == 0) continue;
    CudaStatus status = driver.Status(driver.MemSetAccess(AddressOf(i), BytesOf(i), &access, 1),
                                      "opening the parameters' memory to another GPU of this process");
    if (!status.ok()) return status;
  }
  accesses_.push_back(access);
  return {};
}

SharedGpuMemory::~SharedGpuMemory() {
  const CurrentDevice current(*device_);
  const CudaDriver& driver = device_->driver();
  if (data_ == 0) return;
  if (plain_) {
    driver.MemFree(data_);
    return;
  }
  units_.reset();
  for (uint64_t i = 0; i < pieces_.size(); ++i) (void)Unmap(i);
  driver.MemAddressFree(data_, addresses_);
}

CudaStatus SharedGpuMemory::GiveBack(uint64_t index, CudaStream stream) {
  std::lock_guard lock(mu_);
  if (index >= pieces_.size() || pieces_[index] == 0) return {};
  CudaStatus status = WaitOutside(stream);
  return status.ok() ? Unmap(index) : status;
}

CudaStatus SharedGpuMemory::GiveUnitsBack(CudaStream stream) {
  std::lock_guard lock(mu_);
  if (units_ == nullptr || units_->slots().empty()) return {};
  CudaStatus status = WaitOutside(stream);
  return status.ok() ? units_->Map({}) : status;
}

CudaStatus SharedGpuMemory::GiveAllBack(CudaStream stream) {
  if (plain_) return {kUnimplemented, "this GPU's driver has no virtual memory management, and its memory stays"};
  if (CudaStatus status = GiveUnitsBack(stream); !status.ok()) return status;
  std::lock_guard lock(mu_);
  if (CudaStatus status = WaitOutside(stream); !status.ok()) return status;
  for (; !pieces_.empty(); pieces_.pop_back()) {
    const uint64_t last = pieces_.size() - 1;
    if (CudaStatus status = Unmap(last); !status.ok()) return status;
    backed_bytes_ = last * piece_bytes_;
  }
  return {};
}

// Of a capture.
CudaStatus SharedGpuMemory::WaitOutside(CudaStream stream) const {
  if (CudaStatus status = CheckNotCapturing(*device_, stream); !status.ok()) return status;
  return device_->driver().Status(device_->driver().StreamSynchronize(stream), "waiting for the GPU");
}

CudaStatus SharedGpuMemory::Unmap(uint64_t index) {
  if (pieces_[index] == 0) return {};
  const CudaDriver& driver = device_->driver();
  const int unmapped = driver.MemUnmap(AddressOf(index), BytesOf(index));
  const int released = driver.MemRelease(std::exchange(pieces_[index], 0));
  return driver.Status(unmapped != 0 ? unmapped : released, "giving GPU memory back");
}

CudaStatus SharedGpuMemory::ExportTo(std::vector<int>* descriptors) const {
  SUPEROFFLOAD_CHECK(exportable() && backed_bytes_ == bytes_, backed_bytes_, " bytes of ", bytes_);
  const CudaDriver& driver = device_->driver();
  for (const CudaAllocation piece : pieces_) {
    int descriptor = -1;
    CudaStatus status = driver.Status(driver.MemExportToShareableHandle(&descriptor, piece, kCudaPosixDescriptor, 0),
                                      "exporting GPU memory as a descriptor");
    if (!status.ok()) return status;
    descriptors->push_back(descriptor);
  }
  return {};
}

}  // namespace superoffload::kernels
