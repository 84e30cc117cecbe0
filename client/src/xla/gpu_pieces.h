// Gradients that come in pieces on a stream of XLA's, to which their memory belongs again as soon as the stream has gone
// past the call that brings them:
//
//   XLA's stream   backward ... -> (wait) copy the piece to the bucket's stage -> event -+ -> backward goes on
//   pack stream                    (wait) pack the stage into a device slot     <--------+ -> event of the stage
//
// A stage is GPU memory for one bucket. There are as many as buckets have been incomplete at once; one that was packed
// serves the next bucket, for which XLA's stream waits. A call that ends the step returns after all has been packed, so
// its gradients are packed from where they are. What follows the packing is GpuPlane's.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_GPU_PIECES_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_GPU_PIECES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>

#include "client/src/gpu/gpu_plane.h"
#include "client/src/status.h"
#include "client/src/xla/bucket_parts.h"
#include "client/src/xla/gpu_scalars.h"
#include "kernels/gpu/cuda_device.h"
#include "superoffload/superoffload_gpu.h"

namespace superoffload::client {

// One thread at a time.
class GpuPieces {
 public:
  // `plane` outlives it, ended or not; `stage_bytes` are those of the largest bucket.
  GpuPieces(GpuPlane* plane, uint64_t stage_bytes);
  // Waits for what has been issued.
  ~GpuPieces();
  GpuPieces(const GpuPieces&) = delete;
  GpuPieces& operator=(const GpuPieces&) = delete;

  // The calls that follow, until the next one, are in the order of this stream. FAILED_PRECONDITION: it is captured.
  Status Use(kernels::CudaStream stream);

  // For copies on the stream.
  GpuScalars& scalars() { return scalars_; }

  // RESOURCE_EXHAUSTED: there is no memory for another stage.
  Status Stage(const BucketPart& part, uint64_t element_bytes, const void* from);

  // What packs later waits for what was staged so far.
  Status Staged();

  // `tensors`: the bucket's. The data of those that were staged is 0, and is filled in here; that of others stays until
  // WaitPacked.
  Status Submit(const superoffload_ring_entry& entry, std::span<superoffload_tensor> tensors, kernels::DType dtype);
  void WaitPacked() const;

  // What was staged is dropped.
  void Drop();

  // To memory of XLA's, from there or from the parameters that StreamWaits has made wait for. The destructor waits for it:
  // nobody knows XLA's streams when the parameters' memory is given back.
  Status Copy(void* to, kernels::CudaPointer from, uint64_t bytes);
  Status CopyParameters(uint64_t offset, uint64_t bytes, void* to) { return Copy(to, plane_->parameters() + offset, bytes); }

  GpuPlane& plane() { return *plane_; }
  kernels::CudaStream stream() const { return stream_; }

 private:
  struct StageMemory {
    kernels::CudaPointer memory = 0;
    kernels::OwnedEvent packed;
  };

  Status Open(uint32_t bucket, StageMemory** stage);
  Status Allocate(StageMemory* stage);
  Status Release(uint32_t bucket);
  const kernels::CudaDriver& driver() const { return device_->driver(); }

  GpuPlane* const plane_;
  const std::shared_ptr<const kernels::GpuDevice> device_;
  const uint64_t stage_bytes_;
  kernels::CudaStream stream_;
  std::map<kernels::CudaStream, kernels::OwnedEvent> copied_;  // on it, the last time
  GpuScalars scalars_;
  std::map<uint32_t, StageMemory> open_;  // of buckets whose pieces are not all there
  std::deque<StageMemory> free_;          // the one that was packed first at the front
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_GPU_PIECES_H_
