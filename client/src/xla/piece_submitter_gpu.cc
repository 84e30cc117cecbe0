// What a submitter does where the attachment has a GPU.
#include <algorithm>

#include "client/src/gpu/gpu_layout.h"
#include "client/src/xla/piece_submitter.h"

namespace superoffload::client {

using kernels::CudaStream;

Status PieceSubmitter::CheckWhere(std::optional<CudaStream> stream) const {
  if (gpu_.has_value() == stream.has_value()) return {};
  return gpu_ ? Error(Code::kFailedPrecondition,
                      "the optimizer's parameters are on a GPU, but a gradient is in the host's memory: compute it on "
                      "the GPU, or move it there")
              : Error(Code::kFailedPrecondition,
                      "the optimizer's parameters are on the CPU, but a gradient is on a GPU: build the optimizer with "
                      "parameters on the GPU, or move the gradient");
}

Status PieceSubmitter::UseGpu(CudaStream stream) {
  if (plane_ == nullptr) return Error(Code::kFailedPrecondition, "the optimizer is closed; build a new one");
  if (Status status = CheckWhere(stream); !status.ok()) return status;
  return gpu_->Use(stream);
}

Status PieceSubmitter::ReadOnGpu(std::span<const SmallCopy> copies, CudaStream stream) {
  const std::lock_guard lock(mutex_);
  if (Status status = UseGpu(stream); !status.ok()) return status;
  return gpu_->scalars().Read(copies, stream);
}

Status PieceSubmitter::WriteOnGpu(std::span<const SmallCopy> copies, CudaStream stream) {
  const std::lock_guard lock(mutex_);
  if (Status status = UseGpu(stream); !status.ok()) return status;
  return gpu_->scalars().Write(copies, stream);
}

Status PieceSubmitter::CopyOnGpu(void* to, const void* from, uint64_t bytes, CudaStream stream) {
  const std::lock_guard lock(mutex_);
  if (Status status = UseGpu(stream); !status.ok()) return status;
  return gpu_->Copy(to, reinterpret_cast<kernels::CudaPointer>(from), bytes);
}

Status PieceSubmitter::Stage(std::span<const GradientPiece> pieces) {
  Status status;
  for (const GradientPiece& piece : pieces) {
    const superoffload_xla_parameter& parameter = parameters_[piece.parameter];
    const uint64_t bytes = ElementBytes(parameter.dtype);
    ForEachPart(parameter, buckets_, piece.first, piece.elements, [&](const BucketPart& part, uint64_t before) {
      if (status.ok()) status = gpu_->Stage(part, bytes, static_cast<const char*>(piece.data) + before * bytes);
    });
  }
  return status.ok() ? gpu_->Staged() : status;
}

// All its pieces are there; what nobody has brought is zero.
Status PieceSubmitter::SubmitOnGpu(uint32_t bucket) {
  std::vector<superoffload_tensor> tensors;
  kernels::DType dtype{};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ForEachPart(parameters_[i], buckets_, 0, parameters_[i].elements, [&](const BucketPart& part, uint64_t before) {
      if (part.bucket != bucket) return;
      ToDType(parameters_[i].dtype, &dtype);
      if (absent_[i]) return;
      const auto place = reinterpret_cast<kernels::CudaPointer>(in_place_[i]);
      const kernels::CudaPointer data = place == 0 ? 0 : place + before * ElementBytes(parameters_[i].dtype);
      tensors.push_back({data, part.first, part.elements});
    });
  }
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return plane_->SubmitGradient(
      bucket, [&](const superoffload_ring_entry& entry) { return gpu_->Submit(entry, tensors, dtype); });
}

Status PieceSubmitter::Publish(std::span<void* const> to, CudaStream stream) {
  const std::lock_guard lock(mutex_);
  if (Status status = UseGpu(stream); !status.ok()) return status;
  return PublishOnGpu(to);
}

Status PieceSubmitter::PublishOnGpu(std::span<void* const> to) {
  for (uint32_t bucket = static_cast<uint32_t>(buckets_.size()); bucket-- > 0;) {
    if (Status status = plane_->WaitLatest(bucket, gpu_->plane().resident(bucket), std::nullopt); !status.ok()) {
      return status;
    }
    if (Status status = gpu_->plane().StreamWaits(bucket, gpu_->stream()); !status.ok()) return status;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const uint64_t bytes = parameters_[i].elements * ElementBytes(parameters_[i].dtype);
    if (Status status = gpu_->CopyParameters(parameters_[i].parameters_offset, bytes, to[i]); !status.ok()) {
      return status;
    }
  }
  return gpu_->Staged();  // the step that changes them ends after these copies
}

}  // namespace superoffload::client
