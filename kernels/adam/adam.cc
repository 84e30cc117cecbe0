// Adam and AdamW as data, and their constants by one fixed recipe in fp64.
#include "kernels/adam/adam.h"

#include <cmath>
#include <limits>

#include "kernels/adam/adam_element.h"
#include "kernels/format_variant.h"
#include "kernels/scalar_block_pass.h"
#include "kernels/scalar_pass.h"
#include "kernels/targets.h"

namespace superoffload::kernels {
namespace {

constexpr double kFinite = std::numeric_limits<double>::infinity();

constexpr StateArray kMaster = {"model"}, kMaster16 = {"model", DType::kBFloat16};
constexpr StateArray kMoment16 = {"exp_avg", DType::kBFloat16}, kSquares16 = {"exp_avg_sq", DType::kBFloat16};
constexpr BlockCodec kMomentCodec = DynamicCode<true>::Codec(2), kSquaresCodec = DynamicCode<false>::Codec(4);
constexpr StateArray kMoment8 = {"exp_avg", DType::kUInt8, 1, &kMomentCodec},
                     kMomentScale = {"exp_avg_scale", DType::kFloat32, kCodeBlock},
                     kSquares8 = {"exp_avg_sq", DType::kUInt8, 1, &kSquaresCodec},
                     kSquaresScale = {"exp_avg_sq_scale", DType::kFloat32, kCodeBlock};

constexpr StateArray kArrays[] = {kMaster, {"exp_avg"}, {"exp_avg_sq"}};
constexpr StateArray kBFloat16Arrays[] = {kMaster, kMoment16, kSquares16};
constexpr StateArray kDynamic8Arrays[] = {kMaster, kMoment8, kMomentScale, kSquares8, kSquaresScale};
constexpr StateArray kMasters16Arrays[] = {kMaster16, {"exp_avg"}, {"exp_avg_sq"}};
constexpr StateArray kBFloat16Masters16Arrays[] = {kMaster16, kMoment16, kSquares16};
constexpr StateArray kDynamic8Masters16Arrays[] = {kMaster16, kMoment8, kMomentScale, kSquares8, kSquaresScale};

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
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamKernels, AlgorithmKernels, AdamKernels)

constexpr AlgorithmKernels kScalarAdamBFloat16Kernels = ScalarPasses<AdamElement, formats::kBFloat16>::Table();
constexpr AlgorithmKernels kScalarAdamBFloat16NearestKernels =
    ScalarPasses<AdamElement, formats::kBFloat16Nearest>::Table();
constexpr AlgorithmKernels kScalarAdamMasters16Kernels = ScalarPasses<AdamElement, formats::kMasters16>::Table();
constexpr AlgorithmKernels kScalarAdamBFloat16Masters16Kernels =
    ScalarPasses<AdamElement, formats::kBFloat16Masters16>::Table();
constexpr AlgorithmKernels kScalarAdamDynamic8Kernels =
    ScalarBlockPasses<AdamElement, Masters::kFloat32, true, false>::Table();
constexpr AlgorithmKernels kScalarAdamDynamic8Masters16Kernels =
    ScalarBlockPasses<AdamElement, Masters::kRoundedBFloat16, true, false>::Table();

SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamBFloat16Kernels, AlgorithmKernels, AdamBFloat16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamBFloat16NearestKernels, AlgorithmKernels, AdamBFloat16NearestKernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamDynamic8Kernels, AlgorithmKernels, AdamDynamic8Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamMasters16Kernels, AlgorithmKernels, AdamMasters16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamBFloat16Masters16Kernels, AlgorithmKernels, AdamBFloat16Masters16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedAdamDynamic8Masters16Kernels, AlgorithmKernels, AdamDynamic8Masters16Kernels)

namespace {

constexpr FormatVariant kBFloat16Variant = {formats::kBFloat16, kBFloat16Arrays, SupportedAdamBFloat16Kernels,
                                            "superoffload_resident_adam_bf16"};
constexpr FormatVariant kBFloat16NearestVariant = {formats::kBFloat16Nearest, kBFloat16Arrays,
                                                   SupportedAdamBFloat16NearestKernels,
                                                   "superoffload_resident_adam_bf16_nearest"};
constexpr FormatVariant kDynamic8Variant = {formats::kDynamic8, kDynamic8Arrays, SupportedAdamDynamic8Kernels,
                                            "superoffload_resident_adam_8bit"};
constexpr FormatVariant kMasters16Variant = {formats::kMasters16, kMasters16Arrays, SupportedAdamMasters16Kernels,
                                             "superoffload_resident_adam_masters16"};
constexpr FormatVariant kBFloat16Masters16Variant = {formats::kBFloat16Masters16, kBFloat16Masters16Arrays,
                                                     SupportedAdamBFloat16Masters16Kernels,
                                                     "superoffload_resident_adam_bf16_masters16"};
constexpr FormatVariant kDynamic8Masters16Variant = {formats::kDynamic8Masters16, kDynamic8Masters16Arrays,
                                                     SupportedAdamDynamic8Masters16Kernels,
                                                     "superoffload_resident_adam_8bit_masters16"};

}  // namespace

constexpr Algorithm kAdamW{.name = "adamw",
                           .arrays = kArrays,
                           .scalars = kAdamWScalars,
                           .make_constants = MakeAdamWConstants,
                           .supported = SupportedAdamKernels,
                           .resident_kernel = "superoffload_resident_adam"};
const Algorithm kAdamWBFloat16 = InFormat(kAdamW, "adamw_bf16", kBFloat16Variant);
const Algorithm kAdamWBFloat16Nearest = InFormat(kAdamW, "adamw_bf16_nearest", kBFloat16NearestVariant);
const Algorithm kAdamW8Bit = InFormat(kAdamW, "adamw_8bit", kDynamic8Variant);
const Algorithm kAdamWMasters16 = InFormat(kAdamW, "adamw_bf16_masters", kMasters16Variant);
const Algorithm kAdamWBFloat16Masters16 = InFormat(kAdamW, "adamw_bf16_bf16_masters", kBFloat16Masters16Variant);
const Algorithm kAdamW8BitMasters16 = InFormat(kAdamW, "adamw_8bit_bf16_masters", kDynamic8Masters16Variant);

constexpr Algorithm kAdam{.name = "adam",
                          .arrays = kArrays,
                          .scalars = kAdamScalars,
                          .make_constants = MakeAdamConstants,
                          .supported = SupportedAdamKernels,
                          .resident_kernel = "superoffload_resident_adam"};
const Algorithm kAdamBFloat16 = InFormat(kAdam, "adam_bf16", kBFloat16Variant);
const Algorithm kAdamBFloat16Nearest = InFormat(kAdam, "adam_bf16_nearest", kBFloat16NearestVariant);
const Algorithm kAdam8Bit = InFormat(kAdam, "adam_8bit", kDynamic8Variant);
const Algorithm kAdamMasters16 = InFormat(kAdam, "adam_bf16_masters", kMasters16Variant);
const Algorithm kAdamBFloat16Masters16 = InFormat(kAdam, "adam_bf16_bf16_masters", kBFloat16Masters16Variant);
const Algorithm kAdam8BitMasters16 = InFormat(kAdam, "adam_8bit_bf16_masters", kDynamic8Masters16Variant);

}  // namespace superoffload::kernels
