// What an optimizer algorithm is: data. Its name, its state arrays, its scalars and its passes; everything outside an
// algorithm's own folder loops over these and names none of them.
//
// An algorithm turns (state, gradient) into the next state. Array 0 of the state is the master weight p, in fp32, or in
// bf16 (Masters). What it updates at once is its grain: an element; a block, whose elements share a scale, where blocks
// count from the beginning of each parameter; or a matrix, a whole parameter, for which stages prepare directions
// (MatrixStages). A pass over a chunk does one of
//
//   absorb               state = next(state, pending)                                     written
//   publish              theta = next(state, gradient).p, in the parameter dtype          state is only read
//   absorb_and_publish   both, in this order, in one reading of the state                 (the deferred commit)
//   plain                state = next(state, pending); theta = state.p                    the classic one-pass step
//
// Passes cover elements [first, n) of a chunk of at most kChunkElements, whose arrays begin at the views' pointers;
// `first` is a multiple of kRangeAlignment and of the block. `norm` gets the squares of the published gradient
// (unscaled); it is null where their sum is known. With an undo slot (undo_slot.h), which may be null, a kill inside
// the call can be repaired; BeginRange comes before each call. Every pass is bit-identical on every instruction set and
// to the scalar one. Nothing here allocates, locks or fails.
#ifndef SUPEROFFLOAD_KERNELS_ALGORITHM_H_
#define SUPEROFFLOAD_KERNELS_ALGORITHM_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kernels/elements/elements.h"
#include "kernels/host_device.h"
#include "kernels/random/rounding.h"

namespace superoffload::kernels {

inline constexpr size_t kMaxStateArrays = 6;
inline constexpr size_t kMaxScalars = 16;

// Where a range of a chunk may begin: every parameter does, and the norm's lanes and the vectors of every machine fit.
inline constexpr size_t kRangeAlignment = 64;

// How the codes of one block (bytes), and its fp32 scale, stand for numbers: for whoever has to cut blocks elsewhere. A
// code stands for the product, in fp32, of the scale and what it is under scale 1. Code 0 is the number 0, as the gaps
// of a layout have it. What was decoded is encoded as it was, subnormal numbers aside.
struct BlockCodec {
  size_t scales;  // the array that has them, an entry per block
  void (*decode)(size_t n, const void* codes, const void* scale, float* values);
  void (*encode)(size_t n, const float* values, void* codes, void* scale);
};

// A state array. An entry stands for `elements_per_entry` elements of the parameters, from each parameter's first on:
// one, or a block where the entry is its scale.
struct StateArray {
  std::string_view name;  // in checkpoints, the wire and state dicts
  DType dtype = DType::kFloat32;
  uint32_t elements_per_entry = 1;
  const BlockCodec* codec = nullptr;  // of entries that are worth nothing without their block's scale

  constexpr uint64_t Entries(uint64_t elements) const {
    return (elements + elements_per_entry - 1) / elements_per_entry;
  }
  constexpr uint64_t Bytes(uint64_t elements) const { return Entries(elements) * DTypeBytes(dtype); }
};

// How the arrays but the first are stored, of algorithms that come in several such formats.
enum class Moments {
  kFloat32,
  kBFloat16,         // rounded to nearest even
  kRoundedBFloat16,  // rounded stochastically (random/rounding.h): their mean is what fp32 would have
  kDynamic8,         // codes of 8 bits, each array followed by its blocks' scales (codes/dynamic_code.h)
};

// How the first is. Rounded to nearest, bf16 would lose all updates that are smaller than half of its steps.
enum class Masters {
  kFloat32,
  kRoundedBFloat16,  // stochastically; parameters are bf16, too, and published with the bits that are absorbed
};

struct Format {
  Moments moments = Moments::kFloat32;
  Masters masters = Masters::kFloat32;

  // Of an array that is no code.
  SUPEROFFLOAD_HOST_DEVICE constexpr DType TypeOf(size_t array) const {
    const bool whole = array == 0 ? masters == Masters::kFloat32 : moments == Moments::kFloat32;
    return whole ? DType::kFloat32 : DType::kBFloat16;
  }
};

// Those there are, beside fp32.
namespace formats {
inline constexpr Format kBFloat16 = {Moments::kRoundedBFloat16}, kBFloat16Nearest = {Moments::kBFloat16},
                        kDynamic8 = {Moments::kDynamic8};
inline constexpr Format kMasters16 = {Moments::kFloat32, Masters::kRoundedBFloat16},
                        kBFloat16Masters16 = {Moments::kRoundedBFloat16, Masters::kRoundedBFloat16},
                        kDynamic8Masters16 = {Moments::kDynamic8, Masters::kRoundedBFloat16};
}  // namespace formats

// A hyper-parameter of a parameter group.
struct Scalar {
  std::string_view name;
  double default_value = 0;
  double least = 0;
  double below = 0;  // infinity: any finite number from `least` on
};

// The state of one range of elements, an array each, in the algorithm's order.
struct StateView {
  void* arrays[kMaxStateArrays] = {};
  float* directions = nullptr;  // one per element, of algorithms with stages only
  Rounding rounding = {};       // of algorithms that round stochastically only

  SUPEROFFLOAD_HOST_DEVICE float* Floats(size_t array) const { return static_cast<float*>(arrays[array]); }
};

// The fp32 constants of one step of one parameter group; what they mean is the algorithm's own.
struct StepConstants {
  float values[16] = {};

  template <typename Step>
  static StepConstants Of(const Step& step) {
    static_assert(std::is_trivially_copyable_v<Step> && sizeof(Step) <= sizeof(values));
    StepConstants constants;
    std::memcpy(constants.values, &step, sizeof(step));
    return constants;
  }
  template <typename Step>
  SUPEROFFLOAD_HOST_DEVICE Step As() const {
    static_assert(std::is_trivially_copyable_v<Step> && sizeof(Step) <= sizeof(values));
    Step step;
    std::memcpy(static_cast<void*>(&step), values, sizeof(step));
    return step;
  }

  bool operator==(const StepConstants&) const = default;
};

struct UndoSlot;

// The passes of an algorithm for one instruction set.
struct AlgorithmKernels {
  const char* target;
  void (*absorb)(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                 UndoSlot* undo);
  void (*publish)(size_t first, size_t n, const StateView& state, const StepConstants& publish, ConstElements gradient,
                  MutableElements theta, NormLanes* norm);
  void (*absorb_and_publish)(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                             ConstElements pending, const StepConstants& publish, ConstElements gradient,
                             MutableElements theta, NormLanes* norm, UndoSlot* undo);
  void (*plain)(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                MutableElements theta);
};

// One parameter, as the stages of a pass see it.
struct MatrixView {
  uint64_t rows = 1, columns = 1;  // its first dimension, and the product of the others
  StateView state;                 // from its first element on
  ConstElements gradient;
  float* scratch = nullptr;  // scratch_elements(rows, columns): for what stages hand on beside directions

  uint64_t elements() const { return rows * columns; }
};

// Before the state is written, or parameters are published, stages turn the state and the gradient of a whole matrix
// into directions; the passes then go element by element, from these and the gradient. No stage writes state, so that
// one that was cut off is begun again.
struct MatrixStages {
  uint64_t (*scratch_elements)(uint64_t rows, uint64_t columns);
  size_t count;
  // What stage `stage` does for elements [first, end) of a matrix, of which `first` is a multiple of kChunkElements;
  // other ranges are under way beside it, and stages before have ended. Which ranges there are depends on the matrix
  // only.
  void (*run)(size_t stage, size_t first, size_t end, const MatrixView& matrix, const StepConstants& constants);
};

struct Algorithm {
  std::string_view name;
  std::span<const StateArray> arrays;  // 1 to kMaxStateArrays; the first are the masters
  std::span<const Scalar> scalars;     // at most kMaxScalars

  // `scalars` in the order above, each in its range. `t` counts the steps of the parameter from 1. `gradient_scale`
  // multiplies every gradient: unscale factor times clip coefficient. Computed in fp64 by a fixed recipe, then rounded
  // once: the same bits on every machine.
  StepConstants (*make_constants)(const double* scalars, uint64_t t, double gradient_scale);

  // Those this machine can run, the fastest first, the scalar one last.
  const std::vector<const AlgorithmKernels*>& (*supported)();

  const char* resident_kernel;  // kernels/cuda: `plain` on the GPU; null: there is none

  // The algorithm with the same formula, scalars and names of arrays, all of which it stores in fp32, masters included;
  // null: this one.
  const Algorithm* in_fp32 = nullptr;

  // Stochastically.
  bool rounds_moments = false;
  bool rounds_masters = false;  // so that parameters are bf16, too

  // The grain, where it is not an element.
  uint32_t block_elements = 1;           // a power of two, and that of the scales in `arrays`
  const MatrixStages* stages = nullptr;  // then no pass both absorbs and publishes: that kernel is null

  // So that its passes need StateView::rounding.
  bool rounds_stochastically() const { return rounds_moments || rounds_masters; }

  const AlgorithmKernels& best() const { return *supported().front(); }
  const AlgorithmKernels& scalar() const { return *supported().back(); }

  std::vector<double> DefaultScalars() const {
    std::vector<double> values;
    for (const Scalar& scalar : scalars) values.push_back(scalar.default_value);
    return values;
  }
};

// Every algorithm, and the one of a name; null when there is none.
std::span<const Algorithm* const> Algorithms();
const Algorithm* FindAlgorithm(std::string_view name);

// One more, for the rest of the process. To be called before anybody asks for them.
void AddAlgorithm(const Algorithm& algorithm);

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ALGORITHM_H_
