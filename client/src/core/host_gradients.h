// Gradients in the host's memory: they are copied to the slot that the daemon reads.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_HOST_GRADIENTS_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_HOST_GRADIENTS_H_

#include "client/src/core/gradient_mover.h"
#include "client/src/core/model_layout.h"
#include "client/src/core/step_plane.h"

namespace superoffload::client {

class HostGradients final : public GradientMover {
 public:
  // Both outlive it. `threads`: that a copy may use.
  HostGradients(const ModelLayout* layout, StepPlane* plane, size_t threads)
      : layout_(*layout), plane_(*plane), threads_(threads) {}

  Status Check(const GradientSource& source) const override;
  Status Take(std::span<const GradientPiece> pieces, const GradientSource& source, uint32_t slot,
              std::span<uint64_t> digests) override;
  const void* Where(const GradientPiece& piece, const GradientSource& source, uint32_t slot) const override;
  Status Submit(const superoffload_ring_entry& entry) override;
  Status Publish(std::span<void* const> to, std::optional<StreamNumber> stream) override;
  void Drop() override {}

 private:
  const ModelLayout& layout_;
  StepPlane& plane_;
  const size_t threads_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_HOST_GRADIENTS_H_
