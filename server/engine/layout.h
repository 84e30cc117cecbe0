// The memory plan of an optimizer: which bucket a parameter belongs to, and where everything lies.
//
// Parameters of one group and one pair of dtypes form a run of the flat parameter space, in reverse order of
// registration, so that the bucket whose backward pass finishes first comes first. A run is cut into buckets at
// parameter boundaries; a parameter larger than a bucket is cut inside. Every parameter starts at a multiple of
// kAlignmentElements, so that vectors and tensor views are aligned in every array. Gaps hold zeros and stay zero under
// Adam.
//
// The three arrays of the state memory (master, exp_avg, exp_avg_sq) are indexed by the element's position in the
// flat space; the parameter memory and each gradient slot hold the runs one after the other, in their dtypes.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_LAYOUT_H_
#define SUPEROFFLOAD_SERVER_ENGINE_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/dtype.h"
#include "server/engine/spec.h"

namespace superoffload::engine {

inline constexpr uint64_t kAlignmentElements = 64;
inline constexpr uint32_t kGradientSlots = 2;
inline constexpr uint64_t kMaxBuckets = 1u << 20;

// The slot that holds the gradient of committed step `t`, counted from 1: slots alternate between committed steps, and
// a skipped step's slot is filled again.
constexpr uint32_t SlotOf(uint64_t t) { return static_cast<uint32_t>((t - 1) % kGradientSlots); }

struct BucketLayout {
  uint32_t group = 0;
  kernels::DType dtype = kernels::DType::kBFloat16;
  kernels::DType gradient_dtype = kernels::DType::kBFloat16;
  uint64_t elements = 0;
  uint64_t parameters_offset = 0;                           // bytes
  std::array<uint64_t, kGradientSlots> gradient_offsets{};  // bytes
  uint64_t state_offset = 0;                                // elements
  uint64_t first_chunk = 0;                                 // of all chunks of the optimizer

  uint64_t chunks() const { return (elements + kernels::kChunkElements - 1) / kernels::kChunkElements; }
};

struct Placement {
  uint64_t parameters_offset = 0;                           // bytes
  std::array<uint64_t, kGradientSlots> gradient_offsets{};  // bytes
  uint64_t state_offset = 0;                                // elements
  uint32_t first_bucket = 0;
  uint32_t bucket_count = 0;
};

struct Layout {
  std::vector<BucketLayout> buckets;
  std::vector<Placement> placements;  // one per parameter, in the order of the spec
  uint64_t parameters_bytes = 0;
  uint64_t gradients_bytes = 0;
  uint64_t state_elements = 0;                    // of each of the three arrays
  std::array<uint64_t, 3> state_array_offsets{};  // bytes: master, exp_avg, exp_avg_sq
  uint64_t state_bytes = 0;
  uint64_t chunks = 0;  // of all buckets
};

// INVALID_ARGUMENT naming the field when the spec is not valid.
absl::StatusOr<Layout> PlanLayout(const OptimizerSpec& spec);

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_LAYOUT_H_
