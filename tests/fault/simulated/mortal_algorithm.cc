#include "tests/fault/simulated/mortal_algorithm.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/undo_slot.h"

namespace superoffload::faults {
namespace {

using kernels::Algorithm;
using kernels::AlgorithmKernels;
using kernels::ConstElements;
using kernels::kRangeAlignment;
using kernels::kUndoElements;
using kernels::MatrixView;
using kernels::MutableElements;
using kernels::NormLanes;
using kernels::StateView;
using kernels::StepConstants;
using kernels::UndoSlot;

KernelDeaths* deaths = nullptr;

constexpr size_t kMostAlgorithms = 32;  // each has functions of its own, which is what kernels are given as

// Vectors of the real kernels have no more: the old values of two granules fit.
constexpr size_t kMostLanes = 16;

// The element of [first, n) that the kernel comes to; a range may begin there.
size_t CutIn(const Algorithm& algorithm, size_t first, size_t n) {
  const size_t alignment = std::max<size_t>(kRangeAlignment, algorithm.block_elements);
  return first + deaths->random().Below((n - first + alignment - 1) / alignment) * alignment;
}

// Some entries of [first, first + count) of an array, which has `width` bytes for each.
void Overwrite(void* array, size_t width, size_t first, size_t count) {
  RandomSource& random = deaths->random();
  for (size_t i = first; i < first + count; ++i) {
    const uint64_t garbage = random.Bits();
    if (random.Chance(0.5)) std::memcpy(static_cast<std::byte*>(array) + i * width, &garbage, width);
  }
}

// From element `at` on nothing is done yet, but the granule at `at` is in some stage of its update.
void LeaveTorn(const Algorithm& algorithm, size_t at, size_t n, const StateView& state, UndoSlot* undo,
               const MutableElements* theta) {
  RandomSource& random = deaths->random();
  const bool named = random.Chance(0.7);
  const size_t most =
      algorithm.block_elements > 1 ? algorithm.block_elements : random.Between(1, named ? kUndoElements : kMostLanes);
  const size_t count = std::min<size_t>(n - at, most), kept = kernels::UndoElements(algorithm.block_elements);
  for (size_t a = 0; a < algorithm.arrays.size(); ++a) {
    const kernels::StateArray& array = algorithm.arrays[a];
    for (size_t i = at; i < at + count; i += array.elements_per_entry) {
      if (!named && random.Chance(0.3)) continue;
      std::memcpy(undo->OldBytes(a, kept) + array.Bytes(i % kept),
                  static_cast<const std::byte*>(state.arrays[a]) + array.Bytes(i), kernels::DTypeBytes(array.dtype));
    }
  }
  if (!named) return;
  undo->torn = kernels::TornGranule(at, count);
  for (size_t a = 0; a < algorithm.arrays.size(); ++a) {
    const kernels::StateArray& array = algorithm.arrays[a];
    Overwrite(state.arrays[a], kernels::DTypeBytes(array.dtype), array.Entries(at), array.Entries(count));
  }
  if (theta != nullptr) Overwrite(theta->data, kernels::DTypeBytes(theta->dtype), at, count);
}

// Kernels of algorithm kIndex: the chosen instruction set's, or the scalar ones.
template <size_t kIndex, bool kScalar>
struct Mortal {
  static const Algorithm& real() { return *kernels::Algorithms()[kIndex]; }
  static const AlgorithmKernels& kernels() {
    const auto& supported = real().supported();
    return kScalar ? real().scalar() : *supported[deaths->instruction_set() % supported.size()];
  }
  static bool Dies(size_t first, size_t n) { return first < n && deaths->plan().InKernel(); }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    if (!Dies(first, n)) return kernels().absorb(first, n, state, absorb, pending, undo);
    const size_t cut = CutIn(real(), first, n);
    if (cut > first) kernels().absorb(first, cut, state, absorb, pending, undo);
    LeaveTorn(real(), cut, n, state, undo, nullptr);
    throw ProcessDied();
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    if (!Dies(first, n)) return kernels().publish(first, n, state, publish, gradient, theta, norm);
    const size_t cut = CutIn(real(), first, n);
    if (cut > first) kernels().publish(first, cut, state, publish, gradient, theta, norm);
    Overwrite(theta.data, kernels::DTypeBytes(theta.dtype), cut, std::min(n - cut, kRangeAlignment));
    throw ProcessDied();
  }

  static void AbsorbAndPublish(size_t first, size_t n, const StateView& state, const StepConstants& absorb,
                               ConstElements pending, const StepConstants& publish, ConstElements gradient,
                               MutableElements theta, NormLanes* norm, UndoSlot* undo) {
    if (!Dies(first, n)) {
      return kernels().absorb_and_publish(first, n, state, absorb, pending, publish, gradient, theta, norm, undo);
    }
    const size_t cut = CutIn(real(), first, n);
    if (cut > first) {
      kernels().absorb_and_publish(first, cut, state, absorb, pending, publish, gradient, theta, norm, undo);
    }
    LeaveTorn(real(), cut, n, state, undo, &theta);
    throw ProcessDied();
  }

  static void Plain(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                    MutableElements theta) {
    kernels().plain(first, n, state, absorb, pending, theta);
  }

  static void Run(size_t stage, size_t first, size_t end, const MatrixView& matrix, const StepConstants& constants) {
    real().stages->run(stage, first, end, matrix, constants);
    if (!deaths->plan().InKernel()) return;
    Overwrite(matrix.state.directions, sizeof(float), first, end - first);
    throw ProcessDied();
  }

  static constexpr AlgorithmKernels Table() { return {"MORTAL", Absorb, Publish, AbsorbAndPublish, Plain}; }
};

template <size_t kIndex>
const Algorithm& Make() {
  static constexpr AlgorithmKernels kBest = Mortal<kIndex, false>::Table(), kScalar = Mortal<kIndex, true>::Table();
  static const std::vector<const AlgorithmKernels*> supported = {&kBest, &kScalar};
  static const kernels::MatrixStages* const real_stages = kernels::Algorithms()[kIndex]->stages;
  static const kernels::MatrixStages stages = [] {
    kernels::MatrixStages copy = real_stages == nullptr ? kernels::MatrixStages{} : *real_stages;
    copy.run = Mortal<kIndex, false>::Run;
    return copy;
  }();
  static const Algorithm algorithm = [] {
    Algorithm copy = *kernels::Algorithms()[kIndex];
    copy.supported = []() -> const std::vector<const AlgorithmKernels*>& { return supported; };
    if (real_stages != nullptr) copy.stages = &stages;
    if (copy.in_fp32 != nullptr) {
      copy.in_fp32 =
          &MortalAlgorithm(std::ranges::find(kernels::Algorithms(), copy.in_fp32) - kernels::Algorithms().begin());
    }
    return copy;
  }();
  return algorithm;
}

}  // namespace

KernelDeaths::KernelDeaths(DeathPlan* plan, RandomSource* random) : plan_(*plan), random_(*random) {
  SUPEROFFLOAD_CHECK(deaths == nullptr, "two runs at a time");
  deaths = this;
}

KernelDeaths::~KernelDeaths() { deaths = nullptr; }

void KernelDeaths::ChooseInstructionSet() { instruction_set_ = random_.Below(16); }

const Algorithm& MortalAlgorithm(size_t index) {
  SUPEROFFLOAD_CHECK_LT(index, kernels::Algorithms().size());
  SUPEROFFLOAD_CHECK_LT(index, kMostAlgorithms);
  return [index]<size_t... kIndices>(std::index_sequence<kIndices...>) -> const Algorithm& {
    constexpr const Algorithm& (*kMake[])() = {Make<kIndices>...};
    return kMake[index]();
  }(std::make_index_sequence<kMostAlgorithms>());
}

}  // namespace superoffload::faults
