#include "tests/fault/simulated/scenario.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "tests/fault/simulated/mortal_algorithm.h"
#include "tests/support/algorithm_kinds.h"
#include "tests/support/scalars.h"

namespace superoffload::faults {
namespace {

using engine::SpeculationPolicy;
using kernels::DType;

// Of the seeds have buckets of several chunks, which matter most to algorithms that update whole matrices.
constexpr double kLarge = 0.02, kLargeMatrices = 0.2;

// Those with stages are few, and have rules of their own.
size_t ChooseAlgorithm(RandomSource& random) {
  constexpr double kStages = 0.1;
  const auto algorithms = kernels::Algorithms();
  if (!random.Chance(kStages)) return random.Below(algorithms.size());
  const auto found =
      std::ranges::find_if(algorithms, [](const auto* algorithm) { return algorithm->stages != nullptr; });
  return static_cast<size_t>(found - algorithms.begin());
}

engine::OptimizerSpec MakeSpec(RandomSource& random) {
  constexpr size_t kOfBFloat16 = 2;  // come first
  static constexpr std::array<std::pair<DType, DType>, 5> kDtypes = {{{DType::kBFloat16, DType::kBFloat16},
                                                                      {DType::kBFloat16, DType::kFloat32},
                                                                      {DType::kFloat16, DType::kFloat16},
                                                                      {DType::kFloat16, DType::kFloat32},
                                                                      {DType::kFloat32, DType::kFloat32}}};
  engine::OptimizerSpec spec;
  spec.algorithm = &MortalAlgorithm(ChooseAlgorithm(random));
  spec.groups = {test::ScalarsWith(*spec.algorithm, {{"lr", 1e-2}, {"weight_decay", 0.1}}),
                 test::ScalarsWith(*spec.algorithm, {{"lr", 3e-3}, {"beta2", 0.95}, {"weight_decay", 0}})};
  const auto [dtype, gradient_dtype] =
      kDtypes[random.Below(spec.algorithm->rounds_masters ? kOfBFloat16 : kDtypes.size())];
  const bool large = random.Chance(spec.algorithm->stages == nullptr ? kLarge : kLargeMatrices);
  spec.bucket_bytes = large ? 1 << 20 : engine::kMinBucketBytes;
  const size_t parameters = random.Between(2, 8);
  for (size_t i = 0; i < parameters; ++i) {
    const uint64_t of_several_buckets = random.Between(2'100, 5'000), few = random.Between(1, 600);
    const uint64_t elements = large && i == 1       ? random.Between(70'000, 150'000)
                              : random.Chance(0.05) ? of_several_buckets
                                                    : few;
    spec.parameters.push_back({.name = "p" + std::to_string(i),
                               .shape = {elements},
                               .dtype = dtype,
                               .gradient_dtype = gradient_dtype,
                               .group = static_cast<uint32_t>(random.Below(2)),
                               .unit = static_cast<uint32_t>(random.Below(3)),
                               .global_shape = {},
                               .global_offset = {}});
  }
  if (random.Chance(0.3)) test::KeepSomeInFp32(spec);
  return spec;
}

DeathChances MakeDeaths(RandomSource& random) {
  DeathChances deaths;
  const uint64_t kind = random.Below(4);
  if (kind % 2 == 1) deaths.daemon_deaths = static_cast<uint32_t>(random.Between(1, 6));
  if (kind >= 2) deaths.trainer_deaths = static_cast<uint32_t>(random.Between(1, 4));
  // An event is likely; what is not in every run is found by the runs that have nothing else.
  deaths.event = random.Chance(0.6) ? 0.004 : 0;
  deaths.store = random.Chance(0.7) ? 0.05 : 0;
  deaths.kernel = random.Chance(0.7) ? 0.06 : 0;
  if (random.Chance(0.5)) deaths.hard_times_factor = 6;
  return deaths;
}

// Logs fill up where many steps are committed and little is settled in between.
void UseLogs(RandomSource& random, Scenario& scenario) {
  while (scenario.spec.algorithm->resident_kernel == nullptr) scenario.spec = MakeSpec(random);
  scenario.spec.logged_buckets = static_cast<uint32_t>(random.Between(1, 8));
  scenario.spec.log_slots = static_cast<uint32_t>(random.Between(2, 6));
  scenario.steps = random.Between(3, 14);
  scenario.leave /= 4;
}

void UseOneSlot(RandomSource& random, engine::OptimizerSpec& spec) {
  spec.gradient_slots = 1;
  spec.in_place = spec.log_slots == 0 && spec.algorithm->stages == nullptr && random.Chance(0.5);
  if (!spec.in_place) return;
  for (engine::ParameterSpec& parameter : spec.parameters) parameter.gradient_dtype = parameter.dtype;
}

}  // namespace

Scenario MakeScenario(RandomSource& random, bool gpu) {
  static constexpr SpeculationPolicy kPolicies[] = {SpeculationPolicy::kAlways, SpeculationPolicy::kNever,
                                                    SpeculationPolicy::kAdaptive};
  const auto sometimes = [&](double p, double chance) { return random.Chance(p) ? chance : 0; };
  Scenario scenario;
  scenario.spec = MakeSpec(random);
  scenario.policy = kPolicies[random.Below(3)];
  scenario.workers = random.Between(1, 4);
  scenario.steps = random.Between(2, 7);
  scenario.snapshots = random.Chance(0.4);
  scenario.restores = scenario.snapshots ? static_cast<uint32_t>(random.Below(4)) : 0;
  scenario.clip = random.Unit();
  scenario.leave = sometimes(0.5, 0.3);
  if (scenario.restores > 0) scenario.leave = std::max(scenario.leave, 0.3);  // who attaches may restore
  scenario.edit = sometimes(0.7, 0.7);
  scenario.bad = sometimes(0.5, 0.2);
  scenario.abandon = sometimes(0.3, 0.2);
  scenario.revise = sometimes(0.4, 0.3);
  scenario.measure = sometimes(0.4, 0.4);
  scenario.state_sum = sometimes(0.4, 0.5);
  scenario.absent = sometimes(0.5, 0.25);
  scenario.run = random.Chance(0.3);
  scenario.deaths = MakeDeaths(random);
  if (!gpu) return scenario;
  if (random.Chance(0.4)) UseLogs(random, scenario);
  if (random.Chance(0.4)) UseOneSlot(random, scenario.spec);
  scenario.mover = static_cast<uint32_t>(random.Between(SUPEROFFLOAD_MOVER_DAEMON, SUPEROFFLOAD_MOVER_DIRECT));
  if (!scenario.daemon_copies() && !scenario.spec.in_place && random.Chance(0.4)) {
    scenario.passes = static_cast<uint32_t>(random.Between(2, 3));
  }
  if (!scenario.spec.in_place && random.Chance(0.4)) {
    scenario.stream_slots = static_cast<uint32_t>(random.Between(1, 3));
    scenario.look = 0.3;
    scenario.change_units = sometimes(0.6, 0.5);
    for (engine::ParameterSpec& parameter : scenario.spec.parameters) {
      parameter.unit = static_cast<uint32_t>(random.Below(6));
    }
    return scenario;
  }
  const double residents = scenario.spec.log_slots > 0 ? 0.9 : sometimes(0.6, 0.8),
               change_residents = sometimes(0.4, 0.4);
  if (scenario.spec.algorithm->resident_kernel == nullptr) return scenario;
  scenario.residents = residents;
  scenario.change_residents = change_residents;
  return scenario;
}

}  // namespace superoffload::faults
