// Adam and AdamW as data, and their constants by one fixed recipe in fp64.
#include "kernels/adam/adam.h"

#include <cmath>
#include <limits>

#include "kernels/adam/adam_element.h"
#include "kernels/scalar_block_pass.h"
#include "kernels/scalar_pass.h"
#include "kernels/targets.h"

namespace superoffload::kernels {
namespace {

constexpr double kFinite = std::numeric_limits<double>::infinity();

constexpr StateArray kArrays[] = {{"model"}, {"exp_avg"}, {"exp_avg_sq"}};
constexpr StateArray kBFloat16Arrays[] = {{"model"}, {"exp_avg", DType::kBFloat16}, {"exp_avg_sq", DType::kBFloat16}};

constexpr BlockCodec kMomentCodec = DynamicCode<true>::Codec(2), kSquaresCodec = DynamicCode<false>::Codec(4);
constexpr StateArray kDynamic8Arrays[] = {{"model"},
                                          {"exp_avg", DType::kUInt8, 1, &kMomentCodec},
                                          {"exp_avg_scale", DType::kFloat32, kCodeBlock},
                                          {"exp_avg_sq", DType::kUInt8, 1, &kSquaresCodec},
                                          {"exp_avg_sq_scale", DType::kFloat32, kCodeBlock}};

enum : size_t { kLr, kBeta1, kBeta2, kEps, kWeightDecay };

constexpr double kLeastEpsWithLimits = 1e-15;  // see adam.h

// As in torch.optim.
constexpr Scalar kAdamWScalars[] = {{"lr", 1e-3, 0, kFinite},
                                    {"beta1", 0.9, 0, 1},
                                    {"beta2", 0.999, 0, 1},
                                    {"eps", 1e-8, 0, kFinite},
                                    {"weight_decay", 1e-2, 0, kFinite}};
constexpr Scalar kAdamScalars[] = {kAdamWScalars[kLr],
                                   kAdamWScalars[kBeta1],
                                   kAdamWScalars[kBeta2],
                                   kAdamWScalars[kEps],
                                   {"weight_decay", 0, 0, kFinite}};

// By repeated squaring: libm's pow differs between machines.
double Power(double base, uint64_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

AdamStep MakeStep(const double* scalars, uint64_t t, double gradient_scale) {
  AdamStep step;
  step.gradient_scale = static_cast<float>(gradient_scale);
  step.beta1 = static_cast<float>(scalars[kBeta1]);
  step.one_minus_beta1 = static_cast<float>(1 - scalars[kBeta1]);
  step.beta2 = static_cast<float>(scalars[kBeta2]);
  step.one_minus_beta2 = static_cast<float>(1 - scalars[kBeta2]);
  step.step_size = static_cast<float>(scalars[kLr] / (1 - Power(scalars[kBeta1], t)));
  step.inv_sqrt_bias_correction2 = static_cast<float>(1 / std::sqrt(1 - Power(scalars[kBeta2], t)));
  step.eps = static_cast<float>(scalars[kEps]);
  step.step = static_cast<uint32_t>(t);
  if (scalars[kEps] < kLeastEpsWithLimits) step.least_gradient = step.least_exp_avg = step.least_exp_avg_sq = 0;
  return step;
}

StepConstants MakeAdamWConstants(const double* scalars, uint64_t t, double gradient_scale) {
  AdamStep step = MakeStep(scalars, t, gradient_scale);
  step.decay = static_cast<float>(1 - scalars[kLr] * scalars[kWeightDecay]);
  return StepConstants::Of(step);
}

StepConstants MakeAdamConstants(const double* scalars, uint64_t t, double gradient_scale) {
  AdamStep step = MakeStep(scalars, t, gradient_scale);
  step.l2 = static_cast<float>(scalars[kWeightDecay]);
  return StepConstants::Of(step);
}

}  // namespace

const AlgorithmKernels kScalarAdamKernels = ScalarPasses<AdamElement>::Table();
constexpr AlgorithmKernels kScalarAdamBFloat16Kernels = ScalarPasses<AdamElement, Moments::kRoundedBFloat16>::Table();
constexpr AlgorithmKernels kScalarAdamBFloat16NearestKernels = ScalarPasses<AdamElement, Moments::kBFloat16>::Table();

constexpr AlgorithmKernels kScalarAdamDynamic8Kernels = ScalarBlockPasses<AdamElement, true, false>::Table();

SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamKernels, AlgorithmKernels, AdamKernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamBFloat16Kernels, AlgorithmKernels, AdamBFloat16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamBFloat16NearestKernels, AlgorithmKernels, AdamBFloat16NearestKernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamDynamic8Kernels, AlgorithmKernels, AdamDynamic8Kernels)

const Algorithm kAdamW{.name = "adamw",
                       .arrays = kArrays,
                       .scalars = kAdamWScalars,
                       .make_constants = MakeAdamWConstants,
                       .supported = SupportedAdamKernels,
                       .resident_kernel = "superoffload_resident_adam"};
const Algorithm kAdam{.name = "adam",
                      .arrays = kArrays,
                      .scalars = kAdamScalars,
                      .make_constants = MakeAdamConstants,
                      .supported = SupportedAdamKernels,
                      .resident_kernel = "superoffload_resident_adam"};
const Algorithm kAdamWBFloat16{.name = "adamw_bf16",
                               .arrays = kBFloat16Arrays,
                               .scalars = kAdamWScalars,
                               .make_constants = MakeAdamWConstants,
                               .supported = SupportedAdamBFloat16Kernels,
                               .resident_kernel = "superoffload_resident_adam_bf16",
                               .in_fp32 = &kAdamW,
                               .rounds_stochastically = true};
const Algorithm kAdamWBFloat16Nearest{.name = "adamw_bf16_nearest",
                                      .arrays = kBFloat16Arrays,
                                      .scalars = kAdamWScalars,
                                      .make_constants = MakeAdamWConstants,
                                      .supported = SupportedAdamBFloat16NearestKernels,
                                      .resident_kernel = "superoffload_resident_adam_bf16_nearest",
                                      .in_fp32 = &kAdamW};
const Algorithm kAdamBFloat16{.name = "adam_bf16",
                              .arrays = kBFloat16Arrays,
                              .scalars = kAdamScalars,
                              .make_constants = MakeAdamConstants,
                              .supported = SupportedAdamBFloat16Kernels,
                              .resident_kernel = "superoffload_resident_adam_bf16",
                              .in_fp32 = &kAdam,
                              .rounds_stochastically = true};
const Algorithm kAdamBFloat16Nearest{.name = "adam_bf16_nearest",
                                     .arrays = kBFloat16Arrays,
                                     .scalars = kAdamScalars,
                                     .make_constants = MakeAdamConstants,
                                     .supported = SupportedAdamBFloat16NearestKernels,
                                     .resident_kernel = "superoffload_resident_adam_bf16_nearest",
                                     .in_fp32 = &kAdam};
const Algorithm kAdamW8Bit{.name = "adamw_8bit",
                           .arrays = kDynamic8Arrays,
                           .scalars = kAdamWScalars,
                           .make_constants = MakeAdamWConstants,
                           .supported = SupportedAdamDynamic8Kernels,
                           .resident_kernel = "superoffload_resident_adam_8bit",
                           .in_fp32 = &kAdamW,
                           .block_elements = kCodeBlock};
const Algorithm kAdam8Bit{.name = "adam_8bit",
                          .arrays = kDynamic8Arrays,
                          .scalars = kAdamScalars,
                          .make_constants = MakeAdamConstants,
                          .supported = SupportedAdamDynamic8Kernels,
                          .resident_kernel = "superoffload_resident_adam_8bit",
                          .in_fp32 = &kAdam,
                          .block_elements = kCodeBlock};

}  // namespace superoffload::kernels
