#include "server/engine/spec.h"

#include <cmath>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

namespace superoffload::engine {
namespace {

absl::Status Out(const char* field, double value, const char* range) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, " but must be ", range));
}

absl::Status ValidateParameter(const ParameterSpec& parameter, size_t group_count) {
  if (parameter.name.empty() || parameter.name.size() > kMaxParameterNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a name of ", parameter.name.size(), " bytes; names have 1 to ", kMaxParameterNameBytes));
  }
  if (parameter.group >= group_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", parameter.group, " does not exist; there are ", group_count, " groups"));
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
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateHyperparameters(const kernels::AdamHyperparameters& h) {
  if (!(std::isfinite(h.lr) && h.lr >= 0)) return Out("lr", h.lr, "finite and at least 0");
  if (!(h.beta1 >= 0 && h.beta1 < 1)) return Out("beta1", h.beta1, "at least 0 and less than 1");
  if (!(h.beta2 >= 0 && h.beta2 < 1)) return Out("beta2", h.beta2, "at least 0 and less than 1");
  if (!(std::isfinite(h.eps) && h.eps >= 1e-15)) return Out("eps", h.eps, "finite and at least 1e-15");
  if (!(std::isfinite(h.weight_decay) && h.weight_decay >= 0)) {
    return Out("weight_decay", h.weight_decay, "finite and at least 0");
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
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    if (absl::Status status = ValidateHyperparameters(spec.groups[i]); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("groups[", i, "].", status.message()));
    }
  }
  absl::flat_hash_set<std::string> names;
  for (size_t i = 0; i < spec.parameters.size(); ++i) {
    const ParameterSpec& parameter = spec.parameters[i];
    if (absl::Status status = ValidateParameter(parameter, spec.groups.size()); !status.ok()) {
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

}  // namespace superoffload::engine
