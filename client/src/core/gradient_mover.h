// How gradients get from where a trainer has them to where the daemon takes them. There is one way without a GPU
// (host_gradients.h), and one with (gpu/gpu_gradients.h).
#ifndef SUPEROFFLOAD_CLIENT_SRC_CORE_GRADIENT_MOVER_H_
#define SUPEROFFLOAD_CLIENT_SRC_CORE_GRADIENT_MOVER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "client/src/status.h"
#include "kernels/base/dtype.h"
#include "superoffload/v1/step_ring.h"

namespace superoffload::client {

class GpuGradients;

// A CUstream, as superoffload_gpu.h has it.
using StreamNumber = uint64_t;

// Elements [first, first + elements) of a parameter's gradient, contiguous.
struct GradientPiece {
  uint32_t parameter = 0;
  uint64_t first = 0;
  uint64_t elements = 0;
  const void* data = nullptr;  // on a GPU: a device pointer; null: nothing, but in passes before
  kernels::DType dtype{};
};

// Where pieces are, and whose their memory is afterwards.
struct GradientSource {
  enum class Stays { kNot, kUntilPacked, kUntilOver };

  // They are there when the stream has done what it was given so far. None: they are in the host's memory, now.
  std::optional<StreamNumber> stream;
  // kNot: the memory is the caller's again when the call returns, or when the stream has gone past it.
  Stays stays = Stays::kNot;
};

// One thread at a time.
class GradientMover {
 public:
  virtual ~GradientMover() = default;

  // FAILED_PRECONDITION: this mover takes none from there.
  virtual Status Check(const GradientSource& source) const = 0;

  // Takes pieces of the step that fills `slot`, from a source that was checked. `digests`: of each piece, where it is
  // not empty; 0 on a GPU.
  virtual Status Take(std::span<const GradientPiece> pieces, const GradientSource& source, uint32_t slot,
                      std::span<uint64_t> digests) = 0;

  // The same of a pass after which more come in the same step: added to what those before have brought, once it is all
  // of a bucket, or some of it comes again. `left` is appended each parameter of whose piece nothing is needed any
  // more. UNIMPLEMENTED: from the host.
  virtual Status AddUp(std::span<const GradientPiece>, const GradientSource&, std::vector<uint32_t>*) {
    return Error(Code::kUnimplemented, "gradients of several passes are added up from a GPU only");
  }

  // Where a piece lies that was taken of the step that fills `slot`; null: nobody can tell, or read it.
  virtual const void* Where(const GradientPiece& piece, const GradientSource& source, uint32_t slot) const = 0;

  // All pieces of a bucket have been taken, for the last time, but those of parameters without a gradient. `entry` is
  // its GRADIENT_READY.
  virtual Status Submit(const superoffload_ring_entry& entry) = 0;

  // The step's end comes after what `stream` has been given so far.
  virtual Status EndAfter(StreamNumber) { return {}; }

  // Copies the published parameters, which are final, to `to`, in order, but for those with null there; `stream` as of
  // a source. FAILED_PRECONDITION: one streams.
  virtual Status Publish(std::span<void* const> to, std::optional<StreamNumber> stream) = 0;

  // The memory of pieces that stay until they were packed is the caller's afterwards.
  virtual void WaitPacked() const {}

  // The step is over or dropped.
  virtual void Drop() = 0;

  // Null: this is the host's.
  virtual GpuGradients* gpu() { return nullptr; }
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_CORE_GRADIENT_MOVER_H_
