// Algorithms that no release has, linked into tests: whoever assumes that a state array is fp32, has an entry per
// element, or that elements are updated one by one, fails on them. All are SGD with momentum (no dampening), of one
// element:
//
//   m = fma(momentum, m, widen(gradient) * gradient_scale);   m = |m| < 2^-100 ? 0 : m;   p = fma(-lr, m, p)
//
//   test_momentum_bf16   m is kept in bf16, rounded to nearest even after p was computed
//   test_momentum_8bit   m is kept in 8 bits: two's complement codes, and an fp32 scale per block of 256
//   test_momentum_matrix p moves by m over the root of the mean square that the whole matrix has of it
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/algorithm.h"
#include "kernels/elements/scalar_element.h"
#include "kernels/scalar_pass.h"
#include "kernels/scalar_table.h"
#include "kernels/undo_slot.h"

namespace superoffload::kernels {
namespace {

constexpr Scalar kScalars[] = {{"lr", 1e-2, 0, std::numeric_limits<double>::infinity()}, {"momentum", 0.9, 0, 1}};

struct MomentumStep {
  float gradient_scale = 1, lr = 0, momentum = 0;
};

StepConstants MakeConstants(const double* scalars, uint64_t, double gradient_scale) {
  return StepConstants::Of(
      MomentumStep{static_cast<float>(gradient_scale), static_cast<float>(scalars[0]), static_cast<float>(scalars[1])});
}

void Update(const MomentumStep& step, float gradient, float* p, float* m) {
  *m = std::fma(step.momentum, *m, gradient * step.gradient_scale);
  if (std::fabs(*m) < 0x1p-100f) *m = 0;
  *p = std::fma(-step.lr, *m, *p);
}

struct MomentumElement {
  using Step = MomentumStep;
  static constexpr size_t kArrays = 2;
  static void Update(const MomentumStep& step, float gradient, float* element) {
    kernels::Update(step, gradient, &element[0], &element[1]);
  }
};

constexpr size_t kBlock = 256;

// The code c of a block with scale s, its largest magnitude, stands for c / 64 * s.
constexpr float kLargestCode = 64;

float Decode(uint8_t code, float scale) { return static_cast<float>(static_cast<int8_t>(code)) * scale / kLargestCode; }

uint8_t Encode(float value, float scale) {
  const float code = scale > 0 && std::isfinite(scale) ? std::nearbyint(value / scale * kLargestCode) : 0;
  return static_cast<uint8_t>(
      static_cast<int8_t>(std::isnan(code) ? 0 : std::clamp(code, -kLargestCode, kLargestCode)));
}

float ScaleOf(const float* values, size_t n) {
  float largest = 0;
  for (size_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(values[i]));
  return largest;
}

constexpr BlockCodec kCodec = {.scales = 2,
                               .decode =
                                   [](size_t n, const void* codes, const void* scale, float* values) {
                                     for (size_t i = 0; i < n; ++i) {
                                       values[i] = Decode(static_cast<const uint8_t*>(codes)[i],
                                                          *static_cast<const float*>(scale));
                                     }
                                   },
                               .encode =
                                   [](size_t n, const float* values, void* codes, void* scale) {
                                     const float chosen = *static_cast<float*>(scale) = ScaleOf(values, n);
                                     for (size_t i = 0; i < n; ++i) {
                                       static_cast<uint8_t*>(codes)[i] = Encode(values[i], chosen);
                                     }
                                   }};

// The state of one block after a step, as far as it is known before it is rounded.
struct Block {
  Block(const StateView& state, size_t first, size_t n, const MomentumStep& step, ConstElements gradient) : n(n) {
    std::memcpy(p, state.Floats(0) + first, n * sizeof(float));
    kCodec.decode(n, Codes(state) + first, state.Floats(2) + first / kBlock, m);
    for (size_t i = 0; i < n; ++i) Update(step, LoadElement(gradient, first + i), p + i, m + i);
  }
  static uint8_t* Codes(const StateView& state) { return static_cast<uint8_t*>(state.arrays[1]); }

  const size_t n;
  float p[kBlock], m[kBlock];
};

struct Momentum8 {
  template <typename Visit>
  static void ForEachBlock(size_t first, size_t n, Visit visit) {
    for (size_t i = first; i < n; i += kBlock) visit(i, std::min(kBlock, n - i));
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    ForEachBlock(first, n, [&](size_t i, size_t count) {
      const Block block(state, i, count, absorb.As<MomentumStep>(), pending);
      if (undo != nullptr) {
        std::memcpy(undo->Old<float, kBlock>(0, i), state.Floats(0) + i, count * sizeof(float));
        std::memcpy(undo->Old<uint8_t, kBlock>(1, i), Block::Codes(state) + i, count);
        *undo->Old<float, kBlock, kBlock>(2, i) = state.Floats(2)[i / kBlock];
        KeepOrder();
        undo->torn = TornGranule(i, count);
        KeepOrder();
      }
      std::memcpy(state.Floats(0) + i, block.p, count * sizeof(float));
      kCodec.encode(count, block.m, Block::Codes(state) + i, state.Floats(2) + i / kBlock);
    });
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    ForEachBlock(first, n, [&](size_t i, size_t count) {
      const Block block(state, i, count, publish.As<MomentumStep>(), gradient);
      for (size_t j = 0; j < count; ++j) {
        StoreElement(theta, i + j, block.p[j]);
        const double g = LoadElement(gradient, i + j);
        if (norm != nullptr) norm->lanes[(i + j) % kNormLanes] += g * g;
      }
    });
  }
};

struct MatrixMomentum {
  static float NextMoment(const MomentumStep& step, float gradient, float m) {
    float p = 0;
    Update(step, gradient, &p, &m);
    return m;
  }

  // Stage 0: moments, and a sum of squares per range. Stage 1: what the matrix divides them by.
  static uint64_t ScratchElements(uint64_t rows, uint64_t columns) {
    return (rows * columns + kChunkElements - 1) / kChunkElements;
  }
  static void Run(size_t stage, size_t first, size_t end, const MatrixView& matrix, const StepConstants& constants) {
    float* const directions = matrix.state.directions;
    if (stage == 0) {
      const auto step = constants.As<MomentumStep>();
      double sum = 0;
      for (size_t i = first; i < end; ++i) {
        directions[i] = NextMoment(step, LoadElement(matrix.gradient, i), matrix.state.Floats(1)[i]);
        sum += double{directions[i]} * directions[i];
      }
      matrix.scratch[first / kChunkElements] = static_cast<float>(sum);
      return;
    }
    double sum = 0;
    for (size_t i = 0; i < ScratchElements(matrix.rows, matrix.columns); ++i) sum += matrix.scratch[i];
    const auto root = static_cast<float>(std::sqrt(sum / static_cast<double>(matrix.elements())));
    for (size_t i = first; i < end; ++i) directions[i] = root > 0 ? directions[i] / root : 0;
  }

  static void Absorb(size_t first, size_t n, const StateView& state, const StepConstants& absorb, ConstElements pending,
                     UndoSlot* undo) {
    const auto step = absorb.As<MomentumStep>();
    float* const p = state.Floats(0);
    float* const m = state.Floats(1);
    for (size_t i = first; i < n; ++i) {
      if (undo != nullptr) {
        *undo->Old<float>(0, i) = p[i];
        *undo->Old<float>(1, i) = m[i];
        KeepOrder();
        undo->torn = TornGranule(i, 1);
        KeepOrder();
      }
      m[i] = NextMoment(step, LoadElement(pending, i), m[i]);
      p[i] = std::fma(-step.lr, state.directions[i], p[i]);
    }
  }

  static void Publish(size_t first, size_t n, const StateView& state, const StepConstants& publish,
                      ConstElements gradient, MutableElements theta, NormLanes* norm) {
    const auto step = publish.As<MomentumStep>();
    for (size_t i = first; i < n; ++i) {
      StoreElement(theta, i, std::fma(-step.lr, state.directions[i], state.Floats(0)[i]));
      const double g = LoadElement(gradient, i);
      if (norm != nullptr) norm->lanes[i % kNormLanes] += g * g;
    }
  }
};

constexpr MatrixStages kStages = {MatrixMomentum::ScratchElements, 2, MatrixMomentum::Run};
constexpr AlgorithmKernels kKernelsMatrix = {"SCALAR", MatrixMomentum::Absorb, MatrixMomentum::Publish, nullptr,
                                             ScalarTable<MatrixMomentum>::Plain};
constexpr AlgorithmKernels kKernels16 = ScalarPasses<MomentumElement, formats::kBFloat16Nearest>::Table();
constexpr AlgorithmKernels kKernels8 = ScalarTable<Momentum8>::Table();

template <const AlgorithmKernels& kTable>
const std::vector<const AlgorithmKernels*>& Supported() {
  static const std::vector<const AlgorithmKernels*> supported = {&kTable};
  return supported;
}

constexpr StateArray kArrays16[] = {{"model"}, {"momentum_buffer", DType::kBFloat16}};
constexpr StateArray kArrays8[] = {
    {"model"}, {"momentum_buffer", DType::kUInt8, 1, &kCodec}, {"momentum_buffer_scale", DType::kFloat32, kBlock}};

constexpr StateArray kArraysMatrix[] = {{"model"}, {"momentum_buffer"}};

constexpr Algorithm kMomentum16{.name = "test_momentum_bf16",
                                .arrays = kArrays16,
                                .scalars = kScalars,
                                .make_constants = MakeConstants,
                                .supported = Supported<kKernels16>,
                                .resident_kernel = nullptr};
constexpr Algorithm kMomentum8{.name = "test_momentum_8bit",
                               .arrays = kArrays8,
                               .scalars = kScalars,
                               .make_constants = MakeConstants,
                               .supported = Supported<kKernels8>,
                               .resident_kernel = nullptr,
                               .block_elements = kBlock};
constexpr Algorithm kMomentumMatrix{.name = "test_momentum_matrix",
                                    .arrays = kArraysMatrix,
                                    .scalars = kScalars,
                                    .make_constants = MakeConstants,
                                    .supported = Supported<kKernelsMatrix>,
                                    .resident_kernel = nullptr,
                                    .stages = &kStages};

[[maybe_unused]] const bool added = [] {
  AddAlgorithm(kMomentum16);
  AddAlgorithm(kMomentum8);
  AddAlgorithm(kMomentumMatrix);
  return true;
}();

}  // namespace
}  // namespace superoffload::kernels
