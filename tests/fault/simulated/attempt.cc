#include "tests/fault/simulated/attempt.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tests/support/scalars.h"
#include "tests/support/sums_of_squares.h"

namespace superoffload::faults {
namespace {

using engine::BucketLayout;

// Returns what their norm is about.
double FillGradients(Ground& ground, double scale, Attempt* attempt) {
  RandomSource& random = ground.random;
  const double size = 1e-3 * static_cast<double>(random.Between(1, 8)) / scale;
  uint64_t count = 0;
  for (size_t p = 0; p < ground.layout.placements.size(); ++p) {
    const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
    std::byte* const to = attempt->gradients.data() + ground.layout.placements[p].gradient_offsets[0];
    const uint64_t elements = ElementCount(parameter);
    for (uint64_t i = 0; i < elements; ++i) {
      test::StoreElement(to, i, parameter.gradient_dtype, static_cast<float>(size * (2 * random.Unit() - 1)));
    }
    if (!attempt->absent[p]) count += elements;
  }
  return size * scale * std::sqrt(static_cast<double>(count) / 3);
}

void Spoil(Ground& ground, Attempt* attempt) {
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  static constexpr std::array<float, 3> kBad = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()};
  const size_t p = ground.random.Below(ground.layout.placements.size());
  const engine::ParameterSpec& parameter = ground.scenario.spec.parameters[p];
  test::StoreElement(attempt->gradients.data() + ground.layout.placements[p].gradient_offsets[0],
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
  attempt.gradients.resize(ground.layout.gradients_bytes);
  attempt.absent.resize(scenario.spec.parameters.size());
  for (size_t p = 0; p < attempt.absent.size(); ++p) attempt.absent[p] = random.Chance(scenario.absent);
  attempt.scale = attempt.early_scale = random.Chance(0.3) ? 1.0 / 64 : 1;
  if (random.Chance(scenario.revise)) attempt.early_scale *= 2;
  const double norm = FillGradients(ground, attempt.scale, &attempt);
  if (random.Chance(scenario.clip)) attempt.max_grad_norm = norm * (0.5 + random.Unit());
  if (random.Chance(scenario.bad)) Spoil(ground, &attempt);
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
