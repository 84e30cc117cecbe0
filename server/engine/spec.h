// What a trainer asks for: parameters, parameter groups and how to plan them. Plain values; layout.h checks them.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_SPEC_H_
#define SUPEROFFLOAD_SERVER_ENGINE_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/algorithm.h"

namespace superoffload::engine {

// Hyper-parameters of one parameter group, in the order of the algorithm's scalars.
using Scalars = std::vector<double>;

struct ParameterSpec {
  std::string name;
  std::vector<uint64_t> shape;  // empty for a scalar
  kernels::DType dtype = kernels::DType::kBFloat16;
  kernels::DType gradient_dtype = kernels::DType::kBFloat16;
  uint32_t group = 0;
  uint32_t unit = 0;                      // parameters of one unit are used together; no bucket holds two units
  std::vector<uint64_t> global_shape{};   // of the tensor that this is a shard of; empty: this is the whole tensor
  std::vector<uint64_t> global_offset{};  // of the shard's first element in it, per dimension
  bool in_fp32 = false;                   // its state, by the algorithm's in_fp32
};

// Which part of a training run of several ranks an optimizer is.
struct RunMember {
  std::string run;  // empty: it trains alone
  uint32_t rank = 0;
  uint32_t ranks = 1;
};

// How an optimizer is laid out in memory (layout.h). A record's version says it, and is never changed.
inline constexpr uint32_t kOldestLayoutVersion = 3;
inline constexpr uint32_t kLayoutVersion = 5;

struct OptimizerSpec {
  const kernels::Algorithm* algorithm = kernels::Algorithms().front();
  std::vector<Scalars> groups;
  std::vector<ParameterSpec> parameters;  // in the order of registration in the model
  uint64_t bucket_bytes = 0;              // of gradient, at most; 0 means kDefaultBucketBytes
  uint32_t layout_version = kLayoutVersion;
  RunMember member;
  uint64_t seed = 0;            // Record::seed of a new optimizer
  uint32_t logged_buckets = 0;  // that have a log of gradients, at most: the last ones
  uint32_t log_slots = 0;       // gradients that such a log has room for; 0 where there is none
  uint32_t gradient_slots = 2;  // 1: a gradient lands when the one before it was absorbed, but where there is a log
  bool in_place = false;        // parameters are published over the gradients that they came of
};

inline constexpr uint64_t kDefaultBucketBytes = 64u << 20;
inline constexpr uint64_t kMinBucketBytes = 4u << 10;
inline constexpr uint64_t kMaxBucketBytes = uint64_t{4} << 30;
inline constexpr size_t kMaxGroups = size_t{1} << 16;  // some give each parameter its own
inline constexpr uint32_t kMaxLogSlots = 32;
inline constexpr size_t kMaxParameters = size_t{1} << 20;
inline constexpr size_t kMaxParameterNameBytes = 512;
inline constexpr size_t kMaxDimensions = 64;  // of a parameter, as in PyTorch
inline constexpr size_t kMaxRunNameBytes = 128;
inline constexpr uint64_t kMaxSteps = 0xffffffff;  // committed ones: the claim of an undo slot has 32 bits for them
inline constexpr uint64_t kMaxParameterElements = uint64_t{1} << 40;
// That is updated as a whole: in one bucket of at most kMaxBucketBytes, in any dtype.
inline constexpr uint64_t kMaxMatrixElements = kMaxBucketBytes / sizeof(float);

// INVALID_ARGUMENT naming the scalar that is out of its range.
absl::Status ValidateScalar(const kernels::Scalar& scalar, double value);
absl::Status ValidateScalars(const kernels::Algorithm& algorithm, const Scalars& scalars);

// INVALID_ARGUMENT naming the first field that is wrong.
absl::Status ValidateSpec(const OptimizerSpec& spec);

// Product of the shape; 1 for a scalar. Only for a spec that ValidateSpec accepted.
uint64_t ElementCount(const ParameterSpec& parameter);
uint64_t ElementCount(const OptimizerSpec& spec);  // of all parameters

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_SPEC_H_
