// Lion as data, and its constants by one fixed recipe in fp64.
#include "kernels/lion/lion.h"

#include <limits>

#include "kernels/lion/lion_element.h"
#include "kernels/scalar_block_pass.h"
#include "kernels/scalar_pass.h"
#include "kernels/targets.h"

namespace superoffload::kernels {
namespace {

constexpr double kFinite = std::numeric_limits<double>::infinity();

constexpr StateArray kArrays[] = {{"model"}, {"exp_avg"}};
constexpr StateArray kBFloat16Arrays[] = {{"model"}, {"exp_avg", DType::kBFloat16}};

constexpr BlockCodec kMomentCodec = DynamicCode<true>::Codec(2);
constexpr StateArray kDynamic8Arrays[] = {
    {"model"}, {"exp_avg", DType::kUInt8, 1, &kMomentCodec}, {"exp_avg_scale", DType::kFloat32, kCodeBlock}};

enum : size_t { kLr, kBeta1, kBeta2, kWeightDecay };

// The defaults of the paper's own code.
constexpr Scalar kScalars[] = {
    {"lr", 1e-4, 0, kFinite}, {"beta1", 0.9, 0, 1}, {"beta2", 0.99, 0, 1}, {"weight_decay", 0, 0, kFinite}};

StepConstants MakeConstants(const double* scalars, uint64_t t, double gradient_scale) {
  LionStep step;
  step.gradient_scale = static_cast<float>(gradient_scale);
  step.beta1 = static_cast<float>(scalars[kBeta1]);
  step.one_minus_beta1 = static_cast<float>(1 - scalars[kBeta1]);
  step.beta2 = static_cast<float>(scalars[kBeta2]);
  step.one_minus_beta2 = static_cast<float>(1 - scalars[kBeta2]);
  step.lr = static_cast<float>(scalars[kLr]);
  step.decay = static_cast<float>(1 - scalars[kLr] * scalars[kWeightDecay]);
  step.step = static_cast<uint32_t>(t);
  return StepConstants::Of(step);
}

}  // namespace

const AlgorithmKernels kScalarLionKernels = ScalarPasses<LionElement>::Table();
constexpr AlgorithmKernels kScalarLionBFloat16Kernels = ScalarPasses<LionElement, Moments::kRoundedBFloat16>::Table();
constexpr AlgorithmKernels kScalarLionBFloat16NearestKernels = ScalarPasses<LionElement, Moments::kBFloat16>::Table();

constexpr AlgorithmKernels kScalarLionDynamic8Kernels = ScalarBlockPasses<LionElement, true>::Table();

SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionKernels, AlgorithmKernels, LionKernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionBFloat16Kernels, AlgorithmKernels, LionBFloat16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionBFloat16NearestKernels, AlgorithmKernels, LionBFloat16NearestKernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionDynamic8Kernels, AlgorithmKernels, LionDynamic8Kernels)

const Algorithm kLion{.name = "lion",
                      .arrays = kArrays,
                      .scalars = kScalars,
                      .make_constants = MakeConstants,
                      .supported = SupportedLionKernels,
                      .resident_kernel = "superoffload_resident_lion"};
const Algorithm kLionBFloat16{.name = "lion_bf16",
                              .arrays = kBFloat16Arrays,
                              .scalars = kScalars,
                              .make_constants = MakeConstants,
                              .supported = SupportedLionBFloat16Kernels,
                              .resident_kernel = "superoffload_resident_lion_bf16",
                              .in_fp32 = &kLion,
                              .rounds_stochastically = true};
const Algorithm kLionBFloat16Nearest{.name = "lion_bf16_nearest",
                                     .arrays = kBFloat16Arrays,
                                     .scalars = kScalars,
                                     .make_constants = MakeConstants,
                                     .supported = SupportedLionBFloat16NearestKernels,
                                     .resident_kernel = "superoffload_resident_lion_bf16_nearest",
                                     .in_fp32 = &kLion};
const Algorithm kLion8Bit{.name = "lion_8bit",
                          .arrays = kDynamic8Arrays,
                          .scalars = kScalars,
                          .make_constants = MakeConstants,
                          .supported = SupportedLionDynamic8Kernels,
                          .resident_kernel = "superoffload_resident_lion_8bit",
                          .in_fp32 = &kLion,
                          .block_elements = kCodeBlock};

}  // namespace superoffload::kernels
