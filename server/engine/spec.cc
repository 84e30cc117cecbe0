#include "server/engine/spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace superoffload::engine {
namespace {

absl::Status ValidateShard(const ParameterSpec& parameter) {
  if (parameter.global_shape.empty() && parameter.global_offset.empty()) return absl::OkStatus();
  const size_t dimensions = parameter.shape.size();
  if (std::max(parameter.global_shape.size(), parameter.global_offset.size()) > kMaxDimensions) {
    return absl::InvalidArgumentError(absl::StrCat("global_shape has ", parameter.global_shape.size(),
                                                   " dimensions and global_offset ", parameter.global_offset.size(),
                                                   "; give each as many as shape has, which are ", dimensions));
  }
  bool fits = parameter.global_shape.size() == dimensions && parameter.global_offset.size() == dimensions;
  for (size_t i = 0; fits && i < dimensions; ++i) {
    const uint64_t whole = parameter.global_shape[i];
    fits = parameter.shape[i] <= whole && parameter.global_offset[i] <= whole - parameter.shape[i];
  }
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the shard [", absl::StrJoin(parameter.shape, ", "), "] at [", absl::StrJoin(parameter.global_offset, ", "),
      "] does not lie in the tensor [", absl::StrJoin(parameter.global_shape, ", "), "]"));
}

absl::Status ValidateMatrix(const ParameterSpec& parameter, const kernels::Algorithm& algorithm) {
  if (!parameter.global_shape.empty() && parameter.global_shape != parameter.shape) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it is a shard [", absl::StrJoin(parameter.shape, ", "), "] of [", absl::StrJoin(parameter.global_shape, ", "),
        "], and ", std::string(algorithm.name), " updates whole matrices; give each rank whole ones"));
  }
  if (ElementCount(parameter) > kMaxMatrixElements) {
    return absl::InvalidArgumentError(absl::StrCat("shape [", absl::StrJoin(parameter.shape, ", "), "] has more than ",
                                                   kMaxMatrixElements, " elements, and ", std::string(algorithm.name),
                                                   " updates whole matrices; split it"));
  }
  return absl::OkStatus();
}

// What is rounded stochastically has to know its place in the whole tensor.
absl::Status ValidateRounding(const ParameterSpec& parameter) {
  kernels::BoxElements box;
  if (parameter.global_shape.empty() ||
      kernels::BoxElements::Make(parameter.shape, parameter.global_shape, parameter.global_offset, &box)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the shard [", absl::StrJoin(parameter.shape, ", "), "] is cut in more than ",
                   kernels::BoxElements::kMaxLevels + 1,
                   " dimensions, which stochastic rounding does not follow; shard fewer of them"));
}

absl::Status ValidateParameter(const ParameterSpec& parameter, size_t group_count,
                               const kernels::Algorithm& algorithm) {
  if (parameter.name.empty() || parameter.name.size() > kMaxParameterNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a name of ", parameter.name.size(), " bytes; names have 1 to ", kMaxParameterNameBytes));
  }
  if (parameter.group >= group_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", parameter.group, " does not exist; there are ", group_count, " groups"));
  }
  if (parameter.shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(absl::StrCat("a shape of ", parameter.shape.size(),
                                                   " dimensions; parameters have at most ", kMaxDimensions,
                                                   ": merge some of them"));
  }
  uint64_t elements = 1;
  for (uint64_t extent : parameter.shape) {
    if (extent == 0 || extent > kMaxParameterElements / elements) {
      return absl::InvalidArgumentError(absl::StrCat("shape [", absl::StrCat(extent),
                                                     ", ...] has no elements or more than 2^40; ",
                                                     "leave empty tensors out and split larger ones"));
    }
    elements *= extent;
  }
  if (absl::Status status = ValidateShard(parameter); !status.ok()) return status;
  if (parameter.in_fp32 && algorithm.in_fp32 == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("state_in_float32 is set, and ", std::string(algorithm.name),
                                                   " has no counterpart that keeps its state in fp32; leave it out"));
  }
  if (algorithm.rounds_masters && !parameter.in_fp32 && parameter.dtype != kernels::DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(algorithm.name),
                                                   " has master weights in bf16, but the parameter has another dtype; "
                                                   "set state_in_float32 for it, or cast it to bf16"));
  }
  if (algorithm.rounds_stochastically()) {
    if (absl::Status status = ValidateRounding(parameter); !status.ok()) return status;
  }
  return algorithm.stages == nullptr ? absl::OkStatus() : ValidateMatrix(parameter, algorithm);
}

absl::Status ValidateMember(const RunMember& member) {
  if (member.run.size() > kMaxRunNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("run: a name of ", member.run.size(), " bytes; names have at most ", kMaxRunNameBytes));
  }
  if (member.ranks >= 1 && member.rank < member.ranks && (!member.run.empty() || member.ranks == 1)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("run: rank ", member.rank, " of ", member.ranks, " in run \"",
                                                 member.run, "\"; ranks count from 0, and several need a run's name"));
}

absl::Status ValidateSlots(const OptimizerSpec& spec) {
  if (spec.gradient_slots < 1 || spec.gradient_slots > 2) {
    return absl::InvalidArgumentError(absl::StrCat("gradient_slots is ", spec.gradient_slots, " but must be 1 or 2"));
  }
  if (spec.in_place) {
    if (spec.gradient_slots != 1 || spec.log_slots != 0 || spec.algorithm->stages != nullptr) {
      return absl::InvalidArgumentError(
          "in_place needs one gradient slot and no logs, and an algorithm that updates elements; leave it out");
    }
    for (const ParameterSpec& parameter : spec.parameters) {
      if (parameter.gradient_dtype == parameter.dtype) continue;
      return absl::InvalidArgumentError(absl::StrCat("in_place, but the gradients of ", parameter.name,
                                                     " have another dtype than the parameter; leave it out"));
    }
  }
  if (spec.log_slots == 0 && spec.logged_buckets == 0) return absl::OkStatus();
  if (spec.log_slots < 2 || spec.log_slots > kMaxLogSlots) {
    return absl::InvalidArgumentError(absl::StrCat("log_slots is ", spec.log_slots, " but must be 2 to ", kMaxLogSlots,
                                                   " where buckets have a log of gradients"));
  }
  if (spec.algorithm->stages != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("logged_buckets is ", spec.logged_buckets, " but ",
                                                   std::string(spec.algorithm->name),
                                                   " updates whole matrices, of which none can be resident; "
                                                   "keep no buckets resident"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateScalar(const kernels::Scalar& scalar, double value) {
  if (std::isfinite(value) && value >= scalar.least && value < scalar.below) return absl::OkStatus();
  const bool unbounded = std::isinf(scalar.below);
  return absl::InvalidArgumentError(absl::StrCat(std::string(scalar.name), " is ", value, " but must be ",
                                                 unbounded ? "finite and " : "", "at least ", scalar.least,
                                                 unbounded ? "" : absl::StrCat(" and less than ", scalar.below)));
}

absl::Status ValidateScalars(const kernels::Algorithm& algorithm, const Scalars& scalars) {
  if (scalars.size() != algorithm.scalars.size()) {
    return absl::InvalidArgumentError(absl::StrCat(scalars.size(), " hyper-parameters given; ",
                                                   std::string(algorithm.name), " has ", algorithm.scalars.size()));
  }
  for (size_t i = 0; i < scalars.size(); ++i) {
    if (absl::Status status = ValidateScalar(algorithm.scalars[i], scalars[i]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ValidateSpec(const OptimizerSpec& spec) {
  if (spec.groups.empty() || spec.groups.size() > kMaxGroups) {
    return absl::InvalidArgumentError(
        absl::StrCat("groups: ", spec.groups.size(), " given; an optimizer has 1 to ", kMaxGroups));
  }
  if (spec.parameters.empty() || spec.parameters.size() > kMaxParameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameters: ", spec.parameters.size(), " given; an optimizer has 1 to ", kMaxParameters));
  }
  if (spec.bucket_bytes != 0 && (spec.bucket_bytes < kMinBucketBytes || spec.bucket_bytes > kMaxBucketBytes)) {
    return absl::InvalidArgumentError(absl::StrCat("bucket_bytes is ", spec.bucket_bytes, " but must be 0 or ",
                                                   kMinBucketBytes, " to ", kMaxBucketBytes));
  }
  if (absl::Status status = ValidateSlots(spec); !status.ok()) return status;
  if (spec.layout_version < kOldestLayoutVersion || spec.layout_version > kLayoutVersion) {
    return absl::InvalidArgumentError(absl::StrCat("layout_version is ", spec.layout_version, " but must be ",
                                                   kOldestLayoutVersion, " to ", kLayoutVersion));
  }
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    if (absl::Status status = ValidateScalars(*spec.algorithm, spec.groups[i]); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("groups[", i, "].", status.message()));
    }
  }
  if (absl::Status status = ValidateMember(spec.member); !status.ok()) return status;
  absl::flat_hash_set<std::string> names;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    if (absl::Status status = ValidateParameter(parameter, spec.groups.size(), *spec.algorithm); !status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameters[", i, "] (\"", parameter.name.substr(0, 80), "\"): ", status.message()));
    }
    if (!names.insert(parameter.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameters[", i, "]: the name \"", parameter.name, "\" is taken; list a tied parameter once"));
    }
  }
  return absl::OkStatus();
}

uint64_t ElementCount(const ParameterSpec& parameter) {
  uint64_t elements = 1;
  for (uint64_t extent : parameter.shape) elements *= extent;
  return elements;
}

uint64_t ElementCount(const OptimizerSpec& spec) {
  uint64_t elements = 0;
  for (const ParameterSpec& parameter : spec.parameters) elements += ElementCount(parameter);
  return elements;
}

}  // namespace superoffload::engine
