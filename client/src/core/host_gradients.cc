#include "client/src/core/host_gradients.h"

#include <vector>

#include "client/src/memory_passes.h"

namespace superoffload::client {

Status HostGradients::Check(const GradientSource& source) const {
  if (layout_.has_one_slot()) {
    return Error(Code::kFailedPrecondition,
                 "the optimizer has one slot for gradients, for which only trainers on a GPU wait; create it with two");
  }
  if (!source.stream) return {};
  return Error(Code::kFailedPrecondition,
               "the optimizer's parameters are on the CPU, but a gradient is on a GPU: build the optimizer with "
               "parameters on the GPU, or move the gradient");
}

const void* HostGradients::Where(const GradientPiece& piece, const GradientSource&, uint32_t slot) const {
  const ParameterPlace& place = layout_.parameter(piece.parameter);
  return static_cast<const char*>(plane_.gradients().data()) + place.gradient_offsets[slot] +
         piece.first * kernels::DTypeBytes(place.gradient_dtype);
}

Status HostGradients::Take(std::span<const GradientPiece> pieces, const GradientSource& source, uint32_t slot,
                           std::span<uint64_t> digests) {
  std::vector<superoffload_range> ranges;
  for (const GradientPiece& piece : pieces) {
    const ParameterPlace& place = layout_.parameter(piece.parameter);
    if (piece.dtype != place.gradient_dtype) {
      return Error(Code::kFailedPrecondition, "the gradient of ", place.name, " is ", DTypeName(piece.dtype),
                   ", but was to be ", DTypeName(place.gradient_dtype), " when the optimizer was built");
    }
    void* const to = const_cast<void*>(Where(piece, source, slot));
    const bool is_there = to == piece.data;  // the trainer has written it there
    if (is_there && digests.empty()) continue;
    ranges.push_back({piece.data, is_there ? nullptr : to, piece.elements * kernels::DTypeBytes(piece.dtype)});
  }
  if (digests.empty()) {
    Copy(ranges, threads_);
  } else {
    CopyAndDigest(ranges, threads_, digests);
  }
  return {};
}

Status HostGradients::Submit(const superoffload_ring_entry& entry) { return plane_.plane().Submit(entry); }

Status HostGradients::Publish(std::span<void* const> to, std::optional<StreamNumber>) {
  const char* published = static_cast<const char*>(plane_.parameters().data());
  std::vector<superoffload_range> ranges;
  for (size_t i = 0; i < layout_.parameter_count(); ++i) {
    const ParameterPlace& place = layout_.parameter(i);
    if (to[i] != nullptr) ranges.push_back({published + place.parameters_offset, to[i], place.bytes()});
  }
  Copy(ranges, threads_);
  return {};
}

}  // namespace superoffload::client
