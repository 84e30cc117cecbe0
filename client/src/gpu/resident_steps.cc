#include "client/src/gpu/resident_steps.h"

#include <algorithm>
#include <string>

namespace superoffload::client {

Status ResidentSteps::Open(const ModelLayout& model, const superoffload_gpu_options& options) {
  const char* const name = options.algorithm == nullptr ? "" : options.algorithm;
  algorithm_ = kernels::FindAlgorithm(name);
  if (algorithm_ == nullptr || algorithm_->scalars.size() != model.scalar_count()) {
    return Error(Code::kInvalidArgument, "algorithm \"", name, "\" with ", model.scalar_count(),
                 " scalars is none that this library knows; install the same release as the daemon's");
  }
  if (Status status = OpenFormats(model, options); !status.ok()) return status;
  if (Status status = OpenDraws(model, options); !status.ok()) return status;
  open_.scalars.assign(options.scalars, options.scalars + size_t{model.group_count()} * model.scalar_count());
  open_.absent.assign(model.parameter_count(), false);
  parameter_steps_.assign(model.parameter_count(), options.committed_steps);
  if (options.parameter_steps != nullptr) {
    parameter_steps_.assign(options.parameter_steps, options.parameter_steps + model.parameter_count());
  }
  for (uint32_t bucket = 0; bucket < model.bucket_count(); ++bucket) {
    groups_.push_back(model.bucket(bucket).group);
    parts_.push_back(PartsOf(model, bucket));
  }
  return {};
}

// The algorithm's own, and the same with all state in fp32.
Status ResidentSteps::OpenFormats(const ModelLayout& model, const superoffload_gpu_options& options) {
  uint32_t taken = 0;
  for (const kernels::Algorithm* algorithm : {algorithm_, algorithm_->in_fp32}) {
    if (algorithm == nullptr || taken + algorithm->arrays.size() > options.array_count) break;
    const uint64_t* const first = options.array_offsets + taken;
    taken += static_cast<uint32_t>(algorithm->arrays.size());
    formats_.push_back({algorithm, {first, options.array_offsets + taken}});
  }
  bool known = taken == options.array_count && !formats_.empty();
  for (size_t i = 0; i < model.bucket_count(); ++i) known = known && model.bucket(i).format < formats_.size();
  if (known) return {};
  return Error(Code::kInvalidArgument, "the state of \"", std::string(algorithm_->name), "\" has ", options.array_count,
               " arrays in formats that this library does not know; install the same release as the daemon's");
}

Status ResidentSteps::OpenDraws(const ModelLayout& model, const superoffload_gpu_options& options) {
  if (!algorithm_->rounds_stochastically()) return {};
  for (size_t i = 0; i < model.parameter_count(); ++i) {
    const std::string& name = model.parameter(i).name;
    Draws& draws = draws_.emplace_back();
    draws.key = kernels::RoundingKey(options.seed, kernels::RoundingHash(name));
    if (options.shards == nullptr || options.shards[i].global_dimensions == 0) continue;
    const superoffload_shard& shard = options.shards[i];
    const size_t dimensions = shard.dimensions;
    if (dimensions != shard.global_dimensions ||
        !kernels::BoxElements::Make({shard.shape, dimensions}, {shard.global_shape, dimensions},
                                    {shard.global_offset, dimensions}, &draws.box)) {
      return Error(Code::kInvalidArgument, "parameter ", name, " is no shard of a tensor that rounding follows");
    }
  }
  return {};
}

// Gaps are zeros, and stay that whatever is done to them: a run goes on over them.
std::vector<ResidentSteps::Part> ResidentSteps::PartsOf(const ModelLayout& model, uint32_t bucket) {
  const std::span<const BucketPart> given = model.parts(bucket);
  std::vector<Part> parts;
  uint64_t first = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    const uint64_t last = i + 1 < given.size() ? given[i + 1].place : model.bucket(bucket).elements;
    // The parameter's element at the place where this begins; modulo 2^64, before its first one, too.
    parts.push_back({given[i].parameter, given[i].first - (given[i].place - first), last - first});
    first = last;
  }
  return parts;
}

void ResidentSteps::OnSubmission(const superoffload_ring_entry& entry) {
  const size_t scalars = algorithm_->scalars.size();
  switch (entry.opcode) {
    case SUPEROFFLOAD_SUBMIT_GROUP: {
      const superoffload_group_payload& payload = entry.payload.group;
      if ((entry.index + 1) * scalars > open_.scalars.size() || payload.first + payload.count > scalars) return;
      std::copy_n(payload.values, payload.count, open_.scalars.begin() + entry.index * scalars + payload.first);
      return;
    }
    case SUPEROFFLOAD_SUBMIT_BEGIN_STEP:
      std::fill(open_.absent.begin(), open_.absent.end(), false);
      return;
    case SUPEROFFLOAD_SUBMIT_ABSENT: {
      const uint64_t end = uint64_t{entry.index} + entry.payload.absent.count;
      if (end <= open_.absent.size()) std::fill(open_.absent.begin() + entry.index, open_.absent.begin() + end, true);
      return;
    }
    case SUPEROFFLOAD_SUBMIT_END_STEP: {
      std::lock_guard lock(ended_mu_);
      ended_ = open_;
      ended_.gradient_scale = entry.payload.f64[0];
      return;
    }
    default:
      return;
  }
}

Status ResidentSteps::OnCommit(double clip_coefficient) {
  {
    std::lock_guard lock(ended_mu_);
    committed_ = ended_;
  }
  committed_.gradient_scale *= clip_coefficient;
  if (committed_.scalars.empty()) return Error(Code::kInternal, "the daemon commits a step that was not ended");
  for (size_t i = 0; i < parameter_steps_.size(); ++i) parameter_steps_[i] += committed_.absent[i] ? 0 : 1;
  return {};
}

std::vector<ResidentSteps::Run> ResidentSteps::RunsOf(uint32_t bucket) const {
  const double* const scalars = committed_.scalars.data() + groups_[bucket] * algorithm_->scalars.size();
  std::vector<Run> runs;
  uint64_t first = 0, made_for = 0;  // as a rule all parameters have made the same number of steps
  kernels::StepConstants constants;
  for (const Part& part : parts_[bucket]) {
    if (!committed_.absent[part.parameter]) {
      const uint64_t steps = parameter_steps_[part.parameter];
      if (steps != made_for) constants = algorithm_->make_constants(scalars, steps, committed_.gradient_scale);
      made_for = steps;
      Run* const last = runs.empty() || !draws_.empty() ? nullptr : &runs.back();
      if (last != nullptr && last->first + last->elements == first && last->constants == constants) {
        last->elements += part.elements;
      } else {
        kernels::Rounding rounding;
        if (!draws_.empty()) rounding = {draws_[part.parameter].key, &draws_[part.parameter].box, part.first};
        runs.push_back({first, part.elements, constants, rounding});
      }
    }
    first += part.elements;
  }
  return runs;
}

}  // namespace superoffload::client
