// What a trainer asks for: parameters, parameter groups and how to plan them. Plain values; layout.h checks them.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_SPEC_H_
#define SUPEROFFLOAD_SERVER_ENGINE_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/adam/adam.h"

namespace superoffload::engine {

struct ParameterSpec {
  std::string name;
  std::vector<uint64_t> shape;  // empty for a scalar
  kernels::DType dtype = kernels::DType::kBFloat16;
  kernels::DType gradient_dtype = kernels::DType::kBFloat16;
  uint32_t group = 0;
};

struct OptimizerSpec {
  std::vector<kernels::AdamHyperparameters> groups;
  std::vector<ParameterSpec> parameters;  // in the order of registration in the model
  uint64_t bucket_bytes = 0;              // of gradient; 0 means kDefaultBucketBytes
};

inline constexpr uint64_t kDefaultBucketBytes = 64u << 20;
inline constexpr uint64_t kMinBucketBytes = 4u << 10;
inline constexpr uint64_t kMaxBucketBytes = uint64_t{4} << 30;
inline constexpr size_t kMaxGroups = size_t{1} << 16;  // some give each parameter its own
inline constexpr size_t kMaxParameters = size_t{1} << 20;
inline constexpr size_t kMaxParameterNameBytes = 512;
inline constexpr uint64_t kMaxParameterElements = uint64_t{1} << 40;

// INVALID_ARGUMENT naming the field that is out of the ranges of ParameterGroup in optimizer.proto.
absl::Status ValidateHyperparameters(const kernels::AdamHyperparameters& hyperparameters);

// INVALID_ARGUMENT naming the first field that is wrong.
absl::Status ValidateSpec(const OptimizerSpec& spec);

// Product of the shape; 1 for a scalar. Only for a spec that ValidateSpec accepted.
uint64_t ElementCount(const ParameterSpec& parameter);

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_SPEC_H_
