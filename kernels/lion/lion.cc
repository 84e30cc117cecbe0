// Lion as data, and its constants by one fixed recipe in fp64.
#include "kernels/lion/lion.h"

#include <limits>

#include "kernels/format_variant.h"
#include "kernels/lion/lion_element.h"
#include "kernels/scalar_block_pass.h"
#include "kernels/scalar_pass.h"
#include "kernels/targets.h"

namespace superoffload::kernels {
namespace {

constexpr double kFinite = std::numeric_limits<double>::infinity();

constexpr StateArray kMaster = {"model"}, kMaster16 = {"model", DType::kBFloat16};
constexpr StateArray kMoment16 = {"exp_avg", DType::kBFloat16};
constexpr BlockCodec kMomentCodec = DynamicCode<true>::Codec(2);
constexpr StateArray kMoment8 = {"exp_avg", DType::kUInt8, 1, &kMomentCodec},
                     kMomentScale = {"exp_avg_scale", DType::kFloat32, kCodeBlock};

constexpr StateArray kArrays[] = {kMaster, {"exp_avg"}};
constexpr StateArray kBFloat16Arrays[] = {kMaster, kMoment16};
constexpr StateArray kDynamic8Arrays[] = {kMaster, kMoment8, kMomentScale};
constexpr StateArray kMasters16Arrays[] = {kMaster16, {"exp_avg"}};
constexpr StateArray kBFloat16Masters16Arrays[] = {kMaster16, kMoment16};
constexpr StateArray kDynamic8Masters16Arrays[] = {kMaster16, kMoment8, kMomentScale};

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
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionKernels, AlgorithmKernels, LionKernels)

constexpr AlgorithmKernels kScalarLionBFloat16Kernels = ScalarPasses<LionElement, formats::kBFloat16>::Table();
constexpr AlgorithmKernels kScalarLionBFloat16NearestKernels =
    ScalarPasses<LionElement, formats::kBFloat16Nearest>::Table();
constexpr AlgorithmKernels kScalarLionMasters16Kernels = ScalarPasses<LionElement, formats::kMasters16>::Table();
constexpr AlgorithmKernels kScalarLionBFloat16Masters16Kernels =
    ScalarPasses<LionElement, formats::kBFloat16Masters16>::Table();
constexpr AlgorithmKernels kScalarLionDynamic8Kernels =
    ScalarBlockPasses<LionElement, Masters::kFloat32, true>::Table();
constexpr AlgorithmKernels kScalarLionDynamic8Masters16Kernels =
    ScalarBlockPasses<LionElement, Masters::kRoundedBFloat16, true>::Table();

SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionBFloat16Kernels, AlgorithmKernels, LionBFloat16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionBFloat16NearestKernels, AlgorithmKernels, LionBFloat16NearestKernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionDynamic8Kernels, AlgorithmKernels, LionDynamic8Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionMasters16Kernels, AlgorithmKernels, LionMasters16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionBFloat16Masters16Kernels, AlgorithmKernels, LionBFloat16Masters16Kernels)
SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionDynamic8Masters16Kernels, AlgorithmKernels, LionDynamic8Masters16Kernels)

namespace {

constexpr FormatVariant kBFloat16Variant = {formats::kBFloat16, kBFloat16Arrays, SupportedLionBFloat16Kernels,
                                            "superoffload_resident_lion_bf16"};
constexpr FormatVariant kBFloat16NearestVariant = {formats::kBFloat16Nearest, kBFloat16Arrays,
                                                   SupportedLionBFloat16NearestKernels,
                                                   "superoffload_resident_lion_bf16_nearest"};
constexpr FormatVariant kDynamic8Variant = {formats::kDynamic8, kDynamic8Arrays, SupportedLionDynamic8Kernels,
                                            "superoffload_resident_lion_8bit"};
constexpr FormatVariant kMasters16Variant = {formats::kMasters16, kMasters16Arrays, SupportedLionMasters16Kernels,
                                             "superoffload_resident_lion_masters16"};
constexpr FormatVariant kBFloat16Masters16Variant = {formats::kBFloat16Masters16, kBFloat16Masters16Arrays,
                                                     SupportedLionBFloat16Masters16Kernels,
                                                     "superoffload_resident_lion_bf16_masters16"};
constexpr FormatVariant kDynamic8Masters16Variant = {formats::kDynamic8Masters16, kDynamic8Masters16Arrays,
                                                     SupportedLionDynamic8Masters16Kernels,
                                                     "superoffload_resident_lion_8bit_masters16"};

}  // namespace

constexpr Algorithm kLion{.name = "lion",
                          .arrays = kArrays,
                          .scalars = kScalars,
                          .make_constants = MakeConstants,
                          .supported = SupportedLionKernels,
                          .resident_kernel = "superoffload_resident_lion"};
const Algorithm kLionBFloat16 = InFormat(kLion, "lion_bf16", kBFloat16Variant);
const Algorithm kLionBFloat16Nearest = InFormat(kLion, "lion_bf16_nearest", kBFloat16NearestVariant);
const Algorithm kLion8Bit = InFormat(kLion, "lion_8bit", kDynamic8Variant);
const Algorithm kLionMasters16 = InFormat(kLion, "lion_bf16_masters", kMasters16Variant);
const Algorithm kLionBFloat16Masters16 = InFormat(kLion, "lion_bf16_bf16_masters", kBFloat16Masters16Variant);
const Algorithm kLion8BitMasters16 = InFormat(kLion, "lion_8bit_bf16_masters", kDynamic8Masters16Variant);

}  // namespace superoffload::kernels
