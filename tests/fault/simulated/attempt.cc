#include "tests/fault/simulated/attempt.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/elements/scalar_element.h"
#include "tests/support/scalars.h"
#include "tests/support/sums_of_squares.h"

namespace superoffload::faults {
namespace {

using engine::BucketLayout;

// Each brings some of the gradients; all together bring all that are not absent.
void ChoosePasses(Ground& ground, Attempt* attempt) {
  RandomSource& random = ground.random;
  attempt->passes.resize(random.Between(1, ground.scenario.passes));
  for (AttemptPass& pass : attempt->passes) pass.absent = attempt->absent;
  for (size_t p = 0; attempt->passes.size() > 1 && p < attempt->absent.size(); ++p) {
    const AttemptPass& brings = attempt->passes[random.Below(attempt->passes.size())];
    for (AttemptPass& pass : attempt->passes) {
      if (&pass != &brings && random.Chance(0.3)) pass.absent[p] = true;
    }
  }
}

// Returns what their norm is about.
double FillGradients(Ground& ground, double scale, AttemptPass* pass) {
  RandomSource& random = ground.random;
  const double size = 1e-3 * static_cast<double>(random.Between(1, 8)) / scale;
  uint64_t count = 0;
  pass->gradients.resize(ground.layout.gradients_bytes);
  for (size_t p = 0; p < ground.layout.placements.size(); ++p) {
    const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
    std::byte* const to = pass->gradients.data() + ground.layout.placements[p].gradient_offsets[0];
    const uint64_t elements = ElementCount(parameter);
    for (uint64_t i = 0; i < elements; ++i) {
      test::StoreElement(to, i, parameter.gradient_dtype, static_cast<float>(size * (2 * random.Unit() - 1)));
    }
    if (!pass->absent[p]) count += elements;
  }
  return size * scale * std::sqrt(static_cast<double>(count) / 3);
}

// As autograd does: in fp32, rounded after each.
void AddUp(const Ground& ground, Attempt* attempt) {
  attempt->gradients = attempt->passes[0].gradients;
  if (attempt->passes.size() == 1) return;
  for (size_t p = 0; p < ground.layout.placements.size(); ++p) {
    const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
    const uint64_t offset = ground.layout.placements[p].gradient_offsets[0];
    const kernels::MutableElements sum{attempt->gradients.data() + offset, parameter.gradient_dtype};
    for (uint64_t i = 0; i < ElementCount(parameter); ++i) kernels::StoreElement(sum, i, -0.0f);
    for (const AttemptPass& pass : attempt->passes) {
      if (pass.absent[p]) continue;
      const kernels::ConstElements more{pass.gradients.data() + offset, parameter.gradient_dtype};
      for (uint64_t i = 0; i < ElementCount(parameter); ++i) {
        kernels::StoreElement(sum, i, kernels::LoadElement({sum.data, sum.dtype}, i) + kernels::LoadElement(more, i));
      }
    }
  }
}

void Spoil(Ground& ground, AttemptPass* pass) {
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static constexpr std::array<float, 3> kBad = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()};
  const size_t p = ground.random.Below(ground.layout.placements.size());
  const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
  test::StoreElement(pass->gradients.data() + ground.layout.placements[p].gradient_offsets[0],
                     ground.random.Below(ElementCount(parameter)), parameter.gradient_dtype,
                     kBad[ground.random.Below(kBad.size())]);
}

void Revise(Ground& ground, std::vector<engine::Scalars>* groups) {
  engine::Scalars& group = (*groups)[ground.random.Below(groups->size())];
  *test::FindScalar(*ground.scenario.spec.algorithm, group, "lr") *= 0.5 + ground.random.Unit();
}

}  // namespace

Attempt MakeAttempt(Ground& ground, const std::vector<engine::Scalars>& groups) {
  const Scenario& scenario = ground.scenario;
  RandomSource& random = ground.random;
  Attempt attempt;
  attempt.absent.resize(scenario.spec.parameters.size());
  for (size_t p = 0; p < attempt.absent.size(); ++p) attempt.absent[p] = random.Chance(scenario.absent);
  attempt.scale = attempt.early_scale = random.Chance(0.3) ? 1.0 / 64 : 1;
  if (random.Chance(scenario.revise)) attempt.early_scale *= 2;
  ChoosePasses(ground, &attempt);
  double norm = 0;
  for (AttemptPass& pass : attempt.passes) norm = std::hypot(norm, FillGradients(ground, attempt.scale, &pass));
  if (random.Chance(scenario.clip)) attempt.max_grad_norm = norm * (0.5 + random.Unit());
  if (random.Chance(scenario.bad)) Spoil(ground, &attempt.passes[random.Below(attempt.passes.size())]);
  AddUp(ground, &attempt);
  attempt.bad_elsewhere = scenario.run && random.Chance(scenario.bad);
  attempt.sums.resize(ground.buckets());
  for (uint32_t b = 0; b < ground.buckets(); ++b) {
    const BucketLayout& bucket = ground.layout.buckets[b];
    const auto parts = ground.layout.PartsOf(bucket);
    const bool whole = std::none_of(parts.begin(), parts.end(),
                                    [&](const engine::Part& part) { return attempt.absent[part.parameter]; });
    if (scenario.gpu() || (whole && random.Chance(scenario.state_sum))) {
      attempt.sums[b] = test::SumOfSquares(ground.layout, bucket, attempt.Gradient(bucket), attempt.absent);
    }
  }
  attempt.early_groups = groups;
  if (random.Chance(scenario.revise)) Revise(ground, &attempt.early_groups);
  attempt.groups = attempt.early_groups;
  if (random.Chance(scenario.revise)) Revise(ground, &attempt.groups);
  attempt.measure = random.Chance(scenario.measure);
  if (random.Chance(scenario.abandon)) {
    attempt.abandon_after = static_cast<uint32_t>(random.Between(0, ground.buckets()));
  }
  return attempt;
}

}  // namespace superoffload::faults
