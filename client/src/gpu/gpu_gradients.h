// Gradients in GPU memory, on the way to the device slots.
//
// Those that stay where they are until they were packed are packed from there. Others lie on a stream to which their
// memory belongs again as soon as it has gone past the call that brings them, as XLA's does:
//
//   their stream   backward ... -> (wait) copy the piece to the bucket's stage -> event -+ -> backward goes on
//   pack stream                    (wait) pack the stage into a device slot     <--------+ -> event of the stage
//
// A stage is GPU memory for one bucket. There are as many as buckets have been incomplete at once; one that was packed
// serves the next bucket, for which the stream waits. What follows the packing is GpuPlane's.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_GRADIENTS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_GRADIENTS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "client/src/core/gradient_mover.h"
#include "client/src/core/model_layout.h"
#include "client/src/core/step_plane.h"
#include "client/src/gpu/gpu_plane.h"
#include "client/src/gpu/gpu_scalars.h"
#include "client/src/status.h"
#include "kernels/gpu/cuda_device.h"

namespace superoffload::client {

class GpuGradients final : public GradientMover {
 public:
  // All outlive it; `plane` may have ended.
  GpuGradients(const ModelLayout* layout, StepPlane* steps, GpuPlane* plane);
  // Waits for what has been issued.
  ~GpuGradients() override;
  GpuGradients(const GpuGradients&) = delete;
  GpuGradients& operator=(const GpuGradients&) = delete;

  Status Check(const GradientSource& source) const override;
  // RESOURCE_EXHAUSTED: there is no memory for another stage.
  Status Take(std::span<const GradientPiece> pieces, const GradientSource& source, uint32_t slot,
              std::span<uint64_t> digests) override;
  Status AddUp(std::span<const GradientPiece> pieces, const GradientSource& source,
               std::vector<uint32_t>* left) override;
  const void* Where(const GradientPiece& piece, const GradientSource& source, uint32_t slot) const override;
  Status Submit(const superoffload_ring_entry& entry) override;
  Status EndAfter(StreamNumber stream) override;
  Status Publish(std::span<void* const> to, std::optional<StreamNumber> stream) override;
  void WaitPacked() const override;
  void Drop() override;
  GpuGradients* gpu() override { return this; }

  // In the order of a stream. FAILED_PRECONDITION: it is being captured.
  Status Read(std::span<const SmallCopy> copies, kernels::CudaStream stream);
  Status Write(std::span<const SmallCopy> copies, kernels::CudaStream stream);
  // The destructor waits for it: nobody knows the caller's streams when the parameters' memory is given back.
  Status Copy(void* to, kernels::CudaPointer from, uint64_t bytes, kernels::CudaStream stream);
  // Copies parameters of units that stream, as GpuPlane::ReadUnit has them; `to`: where, of all parameters.
  // FAILED_PRECONDITION: one does not stream.
  Status ReadStreamed(std::span<const int64_t> parameters, std::span<void* const> to, kernels::CudaStream stream);

 private:
  struct StageMemory {
    kernels::CudaPointer memory = 0;
    kernels::OwnedEvent packed;
  };
  // What has come of a bucket.
  struct Tensor {
    BucketTensor tensor;
    kernels::DType dtype;
    kernels::CudaStream stream;
  };

  // Of a bucket of which several passes bring gradients.
  struct Sum {
    std::map<uint64_t, Tensor> pass;  // what has come of the one at hand, by its place; it is not packed
    uint64_t elements = 0;            // of that
    bool begun = false;               // the host has the sum of those before
  };

  Status CopyParameter(size_t index, void* to, kernels::CudaStream stream);
  Status PackPass(uint32_t bucket, std::vector<uint32_t>* left);
  bool IsInPass(uint32_t parameter) const;
  Status TakePart(uint32_t bucket, const BucketPart& part, const GradientPiece& piece, const GradientSource& source);
  Status CopyToStage(uint32_t bucket, const BucketPart& part, uint64_t element_bytes, kernels::CudaPointer from,
                     kernels::CudaStream stream, kernels::CudaPointer* staged);
  Status OpenStage(uint32_t bucket, StageMemory** stage);
  Status AllocateStage(StageMemory* stage);
  Status ReleaseStage(uint32_t bucket);
  Status Pack(const superoffload_ring_entry& entry, std::vector<Tensor> tensors, Pass pass);
  const kernels::CudaDriver& driver() const { return device_->driver(); }

  const ModelLayout& layout_;
  StepPlane& steps_;
  GpuPlane& plane_;
  const std::shared_ptr<const kernels::GpuDevice> device_;
  std::map<kernels::CudaStream, kernels::OwnedEvent> copied_;  // on it, the last time
  GpuScalars scalars_;
  std::map<uint32_t, std::vector<Tensor>> tensors_;  // of buckets that were not submitted
  std::map<uint32_t, Sum> sums_;
  std::map<uint32_t, StageMemory> open_;  // of these, those that have a stage
  std::deque<StageMemory> free_;          // the one that was packed first at the front
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_GRADIENTS_H_
