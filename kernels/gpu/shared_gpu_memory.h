// GPU memory behind one range of addresses, which two processes can map: one makes and exports it, the other imports
// it.
//
//   addresses   [ piece 0 | piece 1 | ... | last piece ]      reserved at once
//   memory      [ piece 0 | piece 1 |                         backed piece by piece, from the first on
//   memory                [ piece 1 |                         given back piece by piece, in any order
//
// Behind them may be addresses of units that stream, which only the first process maps (unit_memory.h).
//
// A range that is backed piece by piece can take over what lies elsewhere in GPU memory while that is given back, so
// that both never exist at once. Each piece is an allocation of the virtual memory API, and its descriptor travels over
// a unix socket. It is allocated here: what a framework's allocator returns may not be exportable (expandable segments,
// memory pools).
//
// Memory of one process that nobody else maps is plain (Allocate).
#ifndef SUPEROFFLOAD_KERNELS_GPU_SHARED_GPU_MEMORY_H_
#define SUPEROFFLOAD_KERNELS_GPU_SHARED_GPU_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/gpu/cuda_device.h"
#include "kernels/gpu/unit_memory.h"

namespace superoffload::kernels {

enum class Export { kNever, kAsDescriptors };

// The device must be current in every call.
class SharedGpuMemory {
 public:
  // Plain memory, at least `bytes`. RESOURCE_EXHAUSTED: out of HBM.
  static CudaStatus Allocate(std::shared_ptr<const GpuDevice> device, uint64_t bytes,
                             std::unique_ptr<SharedGpuMemory>* memory);

  // Addresses for at least `bytes`, with no memory yet, of at most `most_pieces` pieces; and for units that lie behind
  // them, if there are any.
  static CudaStatus Reserve(std::shared_ptr<const GpuDevice> device, uint64_t bytes, uint64_t most_pieces,
                            Export exports, const UnitRanges& units, std::unique_ptr<SharedGpuMemory>* memory);

  // The exporter's memory, in this process: a descriptor per piece; they stay the caller's. INVALID_ARGUMENT: they do
  // not have the bytes that the exporter says.
  static CudaStatus Import(std::shared_ptr<const GpuDevice> device, uint64_t bytes, uint64_t piece_bytes,
                           std::span<const int> descriptors, std::unique_ptr<SharedGpuMemory>* memory);

  ~SharedGpuMemory();
  SharedGpuMemory(const SharedGpuMemory&) = delete;
  SharedGpuMemory& operator=(const SharedGpuMemory&) = delete;

  const GpuDevice& device() const { return *device_; }
  bool exportable() const { return exports_ == Export::kAsDescriptors; }
  CudaPointer data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t piece_bytes() const { return piece_bytes_; }  // of all but the last, which may be shorter
  uint64_t backed_bytes() const { return backed_bytes_; }
  UnitMemory* units() const { return units_.get(); }  // null: there are none

  // Memory for all addresses before `end`, in whole pieces. RESOURCE_EXHAUSTED: out of HBM; what is backed stays.
  CudaStatus Back(uint64_t end);

  // Opens the memory to those other GPUs that the process uses by now and that can reach it: a framework's enabling of
  // peers does not cover it. A GPU that the process does not use gets no mapping. Thread-safe.
  CudaStatus OpenToPeers();

  // Piece `index` has no memory any more, if it had any; its addresses stay taken. Waits for what `stream` has been
  // given, which may still use it: the driver does not. Not for the whole context, which would end a capture of any
  // stream of it. FAILED_PRECONDITION: the stream is being captured; once more when it is not. Thread-safe, after
  // everything else.
  CudaStatus GiveBack(uint64_t index, CudaStream stream);

  // The same of all memory of units.
  CudaStatus GiveUnitsBack(CudaStream stream);

  // The same of everything: as if it had just been reserved. UNIMPLEMENTED: it is plain memory.
  CudaStatus GiveAllBack(CudaStream stream);

  // The descriptor of each piece, which become the caller's. Everything must be backed.
  CudaStatus ExportTo(std::vector<int>* descriptors) const;

 private:
  SharedGpuMemory(std::shared_ptr<const GpuDevice> device, uint64_t bytes, uint64_t piece_bytes, Export exports);
  uint64_t NextPieceBytes() const;
  CudaStatus ReserveAddresses(uint64_t bytes);
  CudaStatus MapNext(CudaAllocation allocation, bool imported);
  CudaStatus OpenTo(CudaDevice peer);
  CudaStatus WaitOutside(CudaStream stream) const;
  CudaPointer AddressOf(uint64_t index) const { return data_ + index * piece_bytes_; }
  uint64_t BytesOf(uint64_t index) const { return std::min(piece_bytes_, bytes_ - index * piece_bytes_); }

  const std::shared_ptr<const GpuDevice> device_;
  const uint64_t bytes_, piece_bytes_;
  const Export exports_;
  std::vector<CudaAccess> accesses_;   // the device itself, and peers
  std::vector<CudaDevice> closed_to_;  // peers that the process has not used so far
  CudaPointer data_ = 0;
  uint64_t addresses_ = 0;  // bytes that are reserved from there on
  std::unique_ptr<UnitMemory> units_;
  bool plain_ = false;
  CudaStatus Unmap(uint64_t index);

  std::mutex mu_;                       // of Back, GiveBack and OpenToPeers
  std::vector<CudaAllocation> pieces_;  // in the order of their addresses; 0: given back
  uint64_t backed_bytes_ = 0;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_SHARED_GPU_MEMORY_H_
