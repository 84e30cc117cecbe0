// The mutex is held while pieces are copied and submitted: the attachment takes submissions from one thread at a time,
// and a step is not taken, ended or begun in the middle of a piece.
#include "client/src/xla/piece_submitter.h"

#include <algorithm>
#include <cstring>

#include "client/src/memory_passes.h"
#include "kernels/check.h"

namespace superoffload::client {
namespace {

Status CheckOptions(const superoffload_xla_options& options) {
  if (options.parameters == nullptr || options.names == nullptr || options.buckets == nullptr) {
    return Error(Code::kInvalidArgument, "NULL argument");
  }
  if (options.parameter_count == 0 || options.group_count == 0 || options.scalar_count == 0 ||
      options.threads == 0) {
    return Error(Code::kInvalidArgument, "there must be a parameter, a group, a scalar and a thread");
  }
  for (uint32_t i = 0; i < options.parameter_count; ++i) {
    const superoffload_xla_parameter& parameter = options.parameters[i];
    const uint64_t last = uint64_t{parameter.first_bucket} + parameter.bucket_count;
    if (ElementBytes(parameter.dtype) == 0 || last > options.bucket_count || options.names[i] == nullptr) {
      return Error(Code::kInvalidArgument, "parameter ", i, " has no name, an unknown dtype or unknown buckets");
    }
  }
  return {};
}

}  // namespace

Status PieceSubmitter::Create(const superoffload_xla_options& options, std::unique_ptr<PieceSubmitter>* submitter) {
  if (Status status = CheckOptions(options); !status.ok()) return status;
  submitter->reset(new PieceSubmitter(options));
  return {};
}

PieceSubmitter::PieceSubmitter(const superoffload_xla_options& options)
    : parameters_(options.parameters, options.parameters + options.parameter_count),
      buckets_(options.buckets, options.buckets + options.bucket_count),
      scalar_count_(options.scalar_count),
      threads_(options.threads),
      names_(options.names, options.names + options.parameter_count),
      bucket_elements_(options.bucket_count),
      scalars_(options.group_count, std::vector<double>(options.scalar_count)) {
  for (const superoffload_xla_parameter& parameter : parameters_) {
    ForEachPart(parameter, buckets_, 0, parameter.elements, [&](const BucketPart& part, uint64_t) {
      bucket_elements_[part.bucket] += part.elements;
      most_bucket_bytes_ =
          std::max(most_bucket_bytes_, buckets_[part.bucket].elements * ElementBytes(parameter.dtype));
    });
  }
  Reset();
}

void PieceSubmitter::Reset() {
  begun_ = taken_ = gone_ = false;
  fault_ = {};
  pieces_.assign(parameters_.size(), {});
  in_place_.assign(parameters_.size(), nullptr);
  arrived_.assign(parameters_.size(), 0);
  absent_.assign(parameters_.size(), false);
  if (gpu_) gpu_->Drop();
  missing_ = bucket_elements_;
  submitted_.clear();
}

void PieceSubmitter::Attach(StepPlane* plane) {
  const std::lock_guard lock(mutex_);
  gpu_.reset();
  plane_ = plane;
  GpuPlane* const gpu = plane == nullptr ? nullptr : plane->plane().gpu();
  if (gpu != nullptr && !gpu->ended()) gpu_.emplace(gpu, most_bucket_bytes_);
  lost_ = false;
}

Status PieceSubmitter::SetScalars(uint32_t group, std::span<const double> scalars) {
  const std::lock_guard lock(mutex_);
  if (group >= scalars_.size() || scalars.size() != scalar_count_) {
    return Error(Code::kInvalidArgument, "group ", group, " with ", scalars.size(), " scalars, but there are ",
                 scalars_.size(), " groups of ", scalar_count_);
  }
  scalars_[group].assign(scalars.begin(), scalars.end());
  return {};
}

void PieceSubmitter::StepOver(uint32_t next_slot, uint64_t committed_steps, double gradient_scale) {
  const std::lock_guard lock(mutex_);
  slot_ = next_slot % 2;
  committed_steps_ = committed_steps;
  gradient_scale_ = gradient_scale;
  Reset();
}

uint64_t PieceSubmitter::committed_steps() const {
  const std::lock_guard lock(mutex_);
  return committed_steps_;
}

Status PieceSubmitter::Arrived(std::span<uint64_t> elements) const {
  const std::lock_guard lock(mutex_);
  std::copy_n(arrived_.begin(), std::min(elements.size(), arrived_.size()), elements.begin());
  return fault_;
}

Status PieceSubmitter::Fail(Status status) {
  const std::lock_guard lock(mutex_);
  if (fault_.ok()) fault_ = status;
  return status;
}

Status PieceSubmitter::HandOver(std::span<const GradientPiece> pieces, std::optional<kernels::CudaStream> stream) {
  const std::lock_guard lock(mutex_);
  const auto run = [&]() -> Status {
    if (Status status = CheckTaking(); !status.ok()) return status;
    if (Status status = stream ? UseGpu(*stream) : CheckWhere(stream); !status.ok()) return status;
    for (const GradientPiece& piece : pieces) {
      if (Status status = CheckPiece(piece); !status.ok()) return status;
    }
    if (Status status = Begin(gradient_scale_); !status.ok()) return status;
    if (!gpu_) {
      Copy(pieces);
    } else if (!gone_) {
      if (Status status = Stage(pieces); !status.ok()) return status;
    }
    for (const GradientPiece& piece : pieces) {
      if (Status status = Arrive(piece.parameter, piece.first, piece.elements); !status.ok()) return status;
    }
    return {};
  };
  Status status = run();
  if (!status.ok() && fault_.ok()) fault_ = status;
  return status;
}

std::optional<uint32_t> PieceSubmitter::FindChanged(std::span<const GradientPiece> values) const {
  const std::lock_guard lock(mutex_);
  return FindChangedBy(values, [this](const auto& ranges) { return FindDifference(ranges, threads_); });
}

std::optional<uint32_t> PieceSubmitter::FindChangedInSamples(std::span<const GradientPiece> values) const {
  const std::lock_guard lock(mutex_);
  return FindChangedBy(
      values, [this](const auto& ranges) { return FindDifferenceInSamples(ranges, threads_, committed_steps_); });
}

template <typename Find>
std::optional<uint32_t> PieceSubmitter::FindChangedBy(std::span<const GradientPiece> values, Find find) const {
  if (!CheckTaking().ok() || gpu_ || gone_ || lost_) return std::nullopt;
  const char* published = static_cast<const char*>(plane_->parameters().data());
  std::vector<superoffload_range> ranges;
  std::vector<uint32_t> parameters;
  for (const GradientPiece& piece : values) {
    if (!CheckPiece(piece).ok()) continue;  // the call that hands it over tells
    const superoffload_xla_parameter& parameter = parameters_[piece.parameter];
    const uint64_t bytes = ElementBytes(parameter.dtype);
    const char* there = published + parameter.parameters_offset + piece.first * bytes;
    ranges.push_back({piece.data, const_cast<char*>(there), piece.elements * bytes});
    parameters.push_back(piece.parameter);
  }
  const size_t found = find(ranges);
  if (found == ranges.size()) return std::nullopt;
  return parameters[found];
}

Status PieceSubmitter::Absent(uint32_t parameter) {
  const std::lock_guard lock(mutex_);
  if (Status status = CheckTaking(); !status.ok()) return status;
  if (parameter < parameters_.size() && arrived_[parameter] > 0) {
    return Error(Code::kFailedPrecondition, names_[parameter], " has a gradient in this step");
  }
  if (Status status = Begin(gradient_scale_); !status.ok()) return status;
  return SubmitAbsent(parameter);
}

Status PieceSubmitter::CheckTaking() const {
  if (plane_ == nullptr) return Error(Code::kFailedPrecondition, "the optimizer is closed; build a new one");
  if (taken_) return Error(Code::kFailedPrecondition, "a gradient came while its step was being ended");
  return {};
}

Status PieceSubmitter::CheckPiece(const GradientPiece& piece) const {
  if (piece.parameter >= parameters_.size()) {
    return Error(Code::kInvalidArgument, "parameter ", piece.parameter, " does not exist; there are ",
                 parameters_.size());
  }
  const std::string& name = names_[piece.parameter];
  const uint64_t all = parameters_[piece.parameter].elements;
  if (piece.first > all || piece.elements > all - piece.first) {
    return Error(Code::kInvalidArgument, "elements ", piece.first, " and ", piece.elements, " more of ", name,
                 " do not exist; it has ", all);
  }
  const auto& pieces = pieces_[piece.parameter];
  const auto after = pieces.lower_bound(piece.first);
  const bool overlaps = (after != pieces.end() && after->first < piece.first + piece.elements) ||
                        (after != pieces.begin() && std::prev(after)->second > piece.first);
  if (overlaps) {
    return Error(Code::kFailedPrecondition, "the gradient of ", name,
                 " came twice in one step: call finish() after each backward pass, and use an offloaded layer once in "
                 "a pass; parameters that several layers share, and gradients of several passes, go to step()");
  }
  return {};
}

Status PieceSubmitter::Begin(double gradient_scale) {
  if (begun_) return {};
  const auto run = [&]() -> Status {
    for (uint32_t group = 0; group < scalars_.size(); ++group) {
      if (Status status = plane_->SetGroup(group, scalars_[group]); !status.ok()) return status;
    }
    return plane_->BeginStep(gradient_scale);
  };
  Status status = run();
  if (!status.ok() && status.code != Code::kUnavailable) return status;
  gone_ = !status.ok();
  begun_ = true;
  gradient_scale_ = gradient_scale;
  return {};
}

void PieceSubmitter::Copy(std::span<const GradientPiece> pieces) {
  char* gradients = static_cast<char*>(plane_->gradients().data());
  std::vector<superoffload_range> ranges;
  for (const GradientPiece& piece : pieces) {
    const superoffload_xla_parameter& parameter = parameters_[piece.parameter];
    const uint64_t bytes = ElementBytes(parameter.dtype);
    ranges.push_back({piece.data, gradients + parameter.gradient_offsets[slot_] + piece.first * bytes,
                      piece.elements * bytes});
  }
  std::vector<uint64_t> digests(ranges.size());
  CopyAndDigest(ranges, threads_, digests);
}

Status PieceSubmitter::SubmitAbsent(uint32_t parameter) {
  if (parameter >= parameters_.size()) return Error(Code::kInvalidArgument, "no such parameter");
  if (!gone_) {
    Status status = plane_->ParametersAbsent(parameter, 1);
    gone_ = status.code == Code::kUnavailable;
    if (!status.ok() && !gone_) return status;
  }
  absent_[parameter] = true;
  return Arrive(parameter, 0, parameters_[parameter].elements);
}

Status PieceSubmitter::Arrive(uint32_t parameter, uint64_t first, uint64_t elements) {
  pieces_[parameter].emplace(first, first + elements);
  arrived_[parameter] += elements;
  Status status;
  ForEachPart(parameters_[parameter], buckets_, first, elements, [&](const BucketPart& part, uint64_t) {
    SUPEROFFLOAD_CHECK_LE(part.elements, missing_[part.bucket]);
    missing_[part.bucket] -= part.elements;
    if (missing_[part.bucket] == 0 && status.ok()) status = Submit(part.bucket);
  });
  return status;
}

Status PieceSubmitter::Submit(uint32_t bucket) {
  submitted_.push_back(bucket);
  if (gone_) return {};
  Status status = gpu_ ? SubmitOnGpu(bucket) : plane_->GradientReady(bucket);
  if (status.code != Code::kUnavailable) return status;
  gone_ = true;
  return {};
}

superoffload_xla_open_step PieceSubmitter::OpenStep() const {
  superoffload_xla_open_step step{.begun = begun_,
                                  .bucket_count = static_cast<uint32_t>(submitted_.size()),
                                  .gone = gone_,
                                  .lost = lost_,
                                  .next_slot = slot_,
                                  .reserved = 0,
                                  .committed_steps = committed_steps_,
                                  .steps = steps_,
                                  .skips = {},
                                  .gradient_scale = gradient_scale_,
                                  .verdict = verdict_};
  std::copy(std::begin(skips_), std::end(skips_), step.skips);
  return step;
}

void PieceSubmitter::Look(superoffload_xla_open_step* step) const {
  const std::lock_guard lock(mutex_);
  *step = OpenStep();
}

Status PieceSubmitter::Take(superoffload_xla_open_step* step, std::span<uint32_t> buckets) {
  const std::lock_guard lock(mutex_);
  taken_ = true;
  SUPEROFFLOAD_CHECK_LE(submitted_.size(), buckets.size());
  std::copy(submitted_.begin(), submitted_.end(), buckets.begin());
  *step = OpenStep();
  return fault_;
}

}  // namespace superoffload::client
