// Lion as data, and its constants by one fixed recipe in fp64.
#include "kernels/lion/lion.h"

#include <limits>

#include "kernels/lion/lion_element.h"
#include "kernels/scalar_pass.h"
#include "kernels/targets.h"

namespace superoffload::kernels {
namespace {

constexpr double kFinite = std::numeric_limits<double>::infinity();

constexpr StateArray kArrays[] = {{"model"}, {"exp_avg"}};

enum : size_t { kLr, kBeta1, kBeta2, kWeightDecay };

// The defaults of the paper's own code.
constexpr Scalar kScalars[] = {
    {"lr", 1e-4, 0, kFinite}, {"beta1", 0.9, 0, 1}, {"beta2", 0.99, 0, 1}, {"weight_decay", 0, 0, kFinite}};

StepConstants MakeConstants(const double* scalars, uint64_t, double gradient_scale) {
  LionStep step;
  step.gradient_scale = static_cast<float>(gradient_scale);
  step.beta1 = static_cast<float>(scalars[kBeta1]);
  step.one_minus_beta1 = static_cast<float>(1 - scalars[kBeta1]);
  step.beta2 = static_cast<float>(scalars[kBeta2]);
  step.one_minus_beta2 = static_cast<float>(1 - scalars[kBeta2]);
  step.lr = static_cast<float>(scalars[kLr]);
  step.decay = static_cast<float>(1 - scalars[kLr] * scalars[kWeightDecay]);
  return StepConstants::Of(step);
}

}  // namespace

const AlgorithmKernels kScalarLionKernels = ScalarPasses<LionElement>::Table();

SUPEROFFLOAD_SUPPORTED_TABLES(SupportedLionKernels, AlgorithmKernels, LionKernels)

const Algorithm kLion{"lion", kArrays, kScalars, MakeConstants, SupportedLionKernels, "superoffload_resident_lion"};

}  // namespace superoffload::kernels
