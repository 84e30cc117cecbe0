// Gradients that come in pieces, from whatever thread: copied to the slot of the open step, which the first one begins.
// A bucket is submitted when all its pieces are there. Where the attachment has a GPU, pieces come on streams.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_PIECE_SUBMITTER_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_PIECE_SUBMITTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/src/status.h"
#include "client/src/step_plane.h"
#include "client/src/xla/bucket_parts.h"
#include "client/src/xla/gpu_pieces.h"
#include "superoffload/superoffload_xla.h"

namespace superoffload::client {

// Elements [first, first + elements) of a parameter's gradient.
struct GradientPiece {
  uint32_t parameter = 0;
  uint64_t first = 0;
  uint64_t elements = 0;
  const void* data = nullptr;
};

// A whole step in one call.
struct WholeStep {
  std::span<const GradientPiece> pieces;  // with `absent` every parameter
  std::span<const uint32_t> absent;       // parameters without a gradient
  std::span<const uint32_t> scheduled;    // scalars that this step gives itself, by place among those of all groups
  std::span<const double> scalars;        // their values
  double gradient_scale = 1;
  double max_grad_norm = 0;
  std::span<void* const> parameters;  // where the published ones go, in order; may be where gradients are
  // At which point of it the pieces are there; `parameters` are when it has done what it is given here. None: on the
  // host, now.
  std::optional<kernels::CudaStream> stream;
};

// Thread-safe. See superoffload_xla.h.
class PieceSubmitter {
 public:
  static Status Create(const superoffload_xla_options& options, std::unique_ptr<PieceSubmitter>* submitter);

  size_t parameter_count() const { return parameters_.size(); }
  size_t bucket_count() const { return buckets_.size(); }
  uint32_t group_count() const { return static_cast<uint32_t>(scalars_.size()); }
  const superoffload_xla_parameter& parameter(size_t index) const { return parameters_[index]; }
  const std::string& name(size_t index) const { return names_[index]; }

  // `plane` is null, or outlives the next call.
  void Attach(StepPlane* plane);
  Status SetScalars(uint32_t group, std::span<const double> scalars);
  void StepOver(uint32_t next_slot, uint64_t committed_steps, double gradient_scale);
  // `stream`: at which point of it the pieces are there, and to which they belong again; none: on the host, now.
  Status HandOver(std::span<const GradientPiece> pieces, std::optional<kernels::CudaStream> stream = std::nullopt);
  Status Absent(uint32_t parameter);
  // A parameter, on the host, of which a piece of `values` has other bytes than the step that was ended last has left,
  // if any. Pieces whose gradient has come are not compared: the daemon may be changing those parameters.
  std::optional<uint32_t> FindChanged(std::span<const GradientPiece> values) const;
  // The same, by samples, other ones in every step.
  std::optional<uint32_t> FindChangedInSamples(std::span<const GradientPiece> values) const;
  Status Arrived(std::span<uint64_t> elements) const;
  void Look(superoffload_xla_open_step* step) const;
  Status Take(superoffload_xla_open_step* step, std::span<uint32_t> buckets);

  // Begins a step, ends it and waits until it is over. After an error no step is open. Nothing that `step` names is used
  // afterwards, but by its stream.
  Status Step(const WholeStep& step, superoffload_verdict* verdict);

  // On the GPU, in the order of `stream`; see GpuScalars.
  Status ReadOnGpu(std::span<const SmallCopy> copies, kernels::CudaStream stream);
  Status WriteOnGpu(std::span<const SmallCopy> copies, kernels::CudaStream stream);
  Status CopyOnGpu(void* to, const void* from, uint64_t bytes, kernels::CudaStream stream);
  // The parameters of the step that was ended last, once they are final; `to`: where, in order. Waits for the daemon.
  Status Publish(std::span<void* const> to, kernels::CudaStream stream);

  uint64_t committed_steps() const;

  // Keeps the first error of a step, for Take().
  Status Fail(Status status);

 private:
  explicit PieceSubmitter(const superoffload_xla_options& options);

  // With mutex_ held.
  Status CheckPiece(const GradientPiece& piece) const;
  Status CheckTaking() const;
  template <typename Find>
  std::optional<uint32_t> FindChangedBy(std::span<const GradientPiece> values, Find find) const;
  Status Begin(double gradient_scale);
  Status CheckWhere(std::optional<kernels::CudaStream> stream) const;
  void Copy(std::span<const GradientPiece> pieces);
  Status Stage(std::span<const GradientPiece> pieces);
  Status UseGpu(kernels::CudaStream stream);
  Status SubmitAbsent(uint32_t parameter);
  Status Arrive(uint32_t parameter, uint64_t first, uint64_t elements);
  Status Submit(uint32_t bucket);
  Status SubmitOnGpu(uint32_t bucket);
  Status PublishOnGpu(std::span<void* const> to);
  void PublishOnHost(std::span<void* const> to);
  Status RunStep(const WholeStep& step, superoffload_verdict* verdict);
  Status UseScheduled(const WholeStep& step);
  superoffload_xla_open_step OpenStep() const;
  void Reset();

  const std::vector<superoffload_xla_parameter> parameters_;
  const std::vector<superoffload_bucket> buckets_;
  const uint32_t scalar_count_;
  const uint32_t threads_;
  std::vector<std::string> names_;
  std::vector<uint64_t> bucket_elements_;  // of parameters, without what lies between them
  uint64_t most_bucket_bytes_ = 0;

  mutable std::mutex mutex_;  // protects what follows, and is held while submitting
  StepPlane* plane_ = nullptr;
  std::optional<GpuPieces> gpu_;  // where the attachment has one
  std::vector<std::vector<double>> scalars_;
  uint32_t slot_ = 0;
  uint64_t committed_steps_ = 0;
  double gradient_scale_ = 1;

  // Of the open step.
  bool begun_ = false;
  bool taken_ = false;
  bool gone_ = false;
  Status fault_;
  std::vector<std::map<uint64_t, uint64_t>> pieces_;  // of each parameter: first -> last + 1
  std::vector<const void*> in_place_;                 // on the GPU: gradients of parameters; null: pieces are staged
  std::vector<uint64_t> arrived_;                     // elements of each parameter
  std::vector<bool> absent_;                          // parameters
  std::vector<uint64_t> missing_;                     // elements of each bucket
  std::vector<uint32_t> submitted_;

  bool lost_ = false;   // a Step(), by the daemon's death
  uint64_t steps_ = 0;  // by Step()
  uint64_t skips_[6]{};  // of them, by the verdict's kind
  superoffload_verdict verdict_{};
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_PIECE_SUBMITTER_H_
