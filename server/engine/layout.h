// The memory plan of an optimizer: which bucket a parameter belongs to, and where everything lies.
//
// Parameters of one group and one pair of dtypes form a range of the flat parameter space, in reverse order of
// registration, so that the bucket whose backward pass finishes first comes first. A range is cut into buckets at
// parameter boundaries; a parameter larger than a bucket is cut inside, between two blocks of the algorithm, or has a
// bucket of its own where the algorithm updates whole matrices. Every parameter starts at a multiple of
// kAlignmentElements, and of a block, in every array. Gaps hold zeros and stay zero under every algorithm.
//
// Buckets taper toward the parameters that backward reaches last, which are those registered first: when one begins, it
// may hold half of the gradient bytes that are left in the model, at most bucket_bytes and at least kTaperBytes. The
// trainer waits for the way of the last bucket, so that one is short: of 64 MiB buckets the last have 32, 16, 8, 4
// and 4.
//
// A bucket never holds parameters of two units (ParameterSpec::unit). In the parameter memory the units lie one after
// the other, in the order in which their first buckets do, so that what the model uses together is one range of it,
// whatever groups and dtypes it has.
//
// The version of a layout is that of the record beside it. Versions:
//
//   3   parameters start at multiples of 64 elements; buckets do not taper
//   4   they start at multiples of 128, and buckets taper; the parameter memory holds the ranges one after the other
//   5   as above
//
// An optimizer keeps the version with which it was created. Checkpoints know parameters by name and shape only.
//
// No layout changes what a step does with an element. It does decide in which order the squares of a norm are added, in
// fp64, so that clip coefficients of two layouts may differ by their last bit; kernels take them as fp32.
//
// A gradient slot has room for the gradients of all buckets. Where there is one only, a bucket's gradient lands there
// when the one before it was absorbed.
//
// Parameters may be published into that slot, over the gradients that they came of (Layout::in_place). Then the
// gradient memory is laid out as the parameter memory, and is it.
//
// The last buckets may have a log: slots for the gradients of more steps than two, of which their state takes in
// several in one reading, a stretch at a time. What goes beyond the gradient slots lies behind all others in the
// gradient memory.
//
// Each state array is indexed by the element's position in the flat space of its format, or by its block's; each
// gradient slot holds the ranges one after the other, in their dtypes.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_LAYOUT_H_
#define SUPEROFFLOAD_SERVER_ENGINE_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/dtype.h"
#include "server/engine/spec.h"

namespace superoffload::engine {

// 256 bytes of the narrowest dtype. That is the alignment which cuBLASLt takes for granted unless its caller says less,
// and the most that it makes use of (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_*_BYTES).
inline constexpr uint64_t kAlignmentElements = 128;
static_assert(kAlignmentElements % kernels::kRangeAlignment == 0);
inline constexpr uint64_t kTaperBytes = uint64_t{4} << 20;
inline constexpr uint32_t kGradientSlots = 2;
inline constexpr uint64_t kMaxBuckets = 1u << 20;
inline constexpr uint64_t kLogStretchElements = 2048;  // whose state stays in the second-level cache
static_assert(kernels::kChunkElements % kLogStretchElements == 0);

// The slot that holds the gradient of committed step `t`, counted from 1: slots alternate between committed steps, and
// a skipped step's slot is filled again.
constexpr uint32_t SlotOf(uint64_t t) { return static_cast<uint32_t>((t - 1) % kGradientSlots); }

inline constexpr uint64_t kLogAlignmentBytes = 4096;

struct BucketLayout {
  uint32_t format = 0;  // in Layout::formats
  uint32_t group = 0;
  uint32_t unit = 0;
  kernels::DType dtype = kernels::DType::kBFloat16;
  kernels::DType gradient_dtype = kernels::DType::kBFloat16;
  uint64_t elements = 0;
  uint64_t parameters_offset = 0;                           // bytes
  std::array<uint64_t, kGradientSlots> gradient_offsets{};  // bytes
  uint64_t state_offset = 0;                                // elements
  uint64_t first_stretch = 0;                               // of all stretches of the optimizer
  uint32_t log_slots = 0;   // gradients that its log has room for, at least 2; 0: it has none
  uint64_t log_offset = 0;  // bytes into the gradients: of slots from the third on, one after the other
  uint32_t first_part = 0;  // in Layout::parts
  uint32_t part_count = 0;

  uint64_t chunks() const { return (elements + kernels::kChunkElements - 1) / kernels::kChunkElements; }
  // Ranges of which the record knows how far their state has come: chunks, or pieces of them where there is a log.
  uint64_t stretch_elements() const { return log_slots == 0 ? kernels::kChunkElements : kLogStretchElements; }
  uint64_t stretches() const { return (elements + stretch_elements() - 1) / stretch_elements(); }
  // Both slots are the same memory.
  bool one_slot() const { return gradient_offsets[0] == gradient_offsets[1]; }
  // The slot that holds the gradient of committed step `t`: all of the log take turns, or the first two.
  uint32_t GradientSlot(uint64_t t, bool logged) const {
    return logged ? static_cast<uint32_t>((t - 1) % log_slots) : SlotOf(t);
  }
  uint64_t GradientOffset(uint32_t slot) const {
    return slot < kGradientSlots ? gradient_offsets[slot] : log_offset + (slot - kGradientSlots) * log_slot_bytes();
  }
  uint64_t log_slot_bytes() const {
    return (gradient_bytes() + kLogAlignmentBytes - 1) / kLogAlignmentBytes * kLogAlignmentBytes;
  }
  uint64_t gradient_bytes() const { return elements * kernels::DTypeBytes(gradient_dtype); }
  uint64_t parameters_bytes() const { return elements * kernels::DTypeBytes(dtype); }
};

struct Placement {
  uint32_t format = 0;                                      // in Layout::formats
  uint64_t parameters_offset = 0;                           // bytes
  std::array<uint64_t, kGradientSlots> gradient_offsets{};  // bytes
  uint64_t state_offset = 0;                                // elements
  uint32_t first_bucket = 0;
  uint32_t bucket_count = 0;
};

// What a bucket holds of one parameter, the gap behind it included. A bucket's parts lie one after the other.
struct Part {
  uint32_t parameter = 0;
  uint64_t elements = 0;
};

// Where a state array lies in the state memory, from byte `offset` on.
struct ArrayLayout {
  uint64_t offset = 0;
  kernels::StateArray array;
};

// How the state of some parameters is stored: as the arrays of one algorithm, each for the elements of those
// parameters.
struct StateFormat {
  const kernels::Algorithm* algorithm = nullptr;
  uint64_t elements = 0;
  std::vector<ArrayLayout> arrays{};  // in the algorithm's order

  // The byte of the state memory at which the entry of `array` for element `element` begins, the first of its block.
  uint64_t Byte(size_t array, uint64_t element) const {
    return arrays[array].offset + arrays[array].array.Bytes(element);
  }

  // What all arrays have for so many elements, in bytes.
  uint64_t Bytes(uint64_t count) const {
    uint64_t bytes = 0;
    for (const ArrayLayout& layout : arrays) bytes += layout.array.Bytes(count);
    return bytes;
  }
};

// A parameter of an algorithm with stages, as MatrixView has it.
struct MatrixLayout {
  uint64_t rows = 1, columns = 1;
  uint64_t elements() const { return rows * columns; }
};

// What a parameter is rounded with, under a seed, of algorithms that round stochastically.
struct ParameterRounding {
  uint64_t hash = 0;         // of its name
  kernels::BoxElements box;  // which of the tensor's elements it has
};

struct Layout {
  uint32_t version = kLayoutVersion;
  const kernels::Algorithm* algorithm = nullptr;
  uint32_t groups = 0;
  uint32_t kept_steps = kGradientSlots;  // committed ones of which the record knows everything
  bool has_logs = false;                 // some buckets have one
  bool has_one_slot = false;             // some buckets have one only
  bool in_place = false;                 // the parameter memory is the gradient memory
  std::vector<BucketLayout> buckets;
  std::vector<Part> parts;            // of all buckets
  std::vector<Placement> placements;  // one per parameter, in the order of the spec
  uint64_t parameters_bytes = 0;
  uint64_t gradients_bytes = 0;
  uint64_t logs_bytes = 0;  // of these: what logs have beyond the slots of all buckets
  // That of `algorithm`, and behind it, if some parameters have their state in fp32, that of its in_fp32.
  std::vector<StateFormat> formats;
  std::vector<ParameterRounding> roundings;  // one per parameter; none unless the algorithm rounds stochastically
  // Of algorithms with stages: the matrices, one per parameter, and where in the state memory directions and scratch of
  // one bucket lie, which all take in turn.
  std::vector<MatrixLayout> matrices;
  uint64_t directions_offset = 0;  // bytes
  uint64_t directions_elements = 0;
  uint64_t scratch_elements = 0;  // behind the directions
  uint64_t state_bytes = 0;
  uint64_t stretches = 0;  // of all buckets

  std::span<const Part> PartsOf(const BucketLayout& bucket) const {
    return std::span(parts).subspan(bucket.first_part, bucket.part_count);
  }

  const StateFormat& FormatOf(const BucketLayout& bucket) const { return formats[bucket.format]; }
  const StateFormat& FormatOf(const Placement& placement) const { return formats[placement.format]; }

  // Of all formats, gaps included.
  uint64_t state_elements() const {
    uint64_t elements = 0;
    for (const StateFormat& format : formats) elements += format.elements;
    return elements;
  }

  // For state of `parameter` in a range that begins at element `state_element`; it may begin before the parameter.
  kernels::Rounding RoundingOf(uint32_t parameter, uint64_t state_element, uint64_t seed) const {
    const ParameterRounding& rounding = roundings[parameter];
    return {kernels::RoundingKey(seed, rounding.hash), &rounding.box,
            state_element - placements[parameter].state_offset};
  }
};

// INVALID_ARGUMENT naming the field when the spec is not valid.
absl::StatusOr<Layout> PlanLayout(const OptimizerSpec& spec);

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_LAYOUT_H_
