#include "server/simulator/workload.h"

#include <gtest/gtest.h>

#include <numeric>

#include "server/simulator/catalogue.h"
#include "server/simulator/outcome.h"

namespace superoffload::simulator {
namespace {

constexpr GpuModel kPlainGpu{.peak_flops = 1e15,
                             .matmul_efficiency = 0.5,
                             .attention_efficiency = 0.25,
                             .memory_bytes = 1e11,
                             .memory_bandwidth = 1e12,
                             .block_traffic = 100,
                             .block_overhead = 1e-3};

Workload Gpt2(const Pass& pass, uint64_t accumulation = 1) {
  return MakeWorkload(kPlainGpu, *FindModel("gpt2-1b"), pass, accumulation);
}

TEST(WorkloadTest, ABlockTakesItsProductsItsAttentionItsTrafficAndItsOverhead) {
  const Workload workload = Gpt2({.batch = 2, .sequence = 1024, .checkpointing = Checkpointing::kNone});
  const double tokens = 2048, hidden = 2048;
  const double products = 24 * hidden * hidden, attention = 4 * hidden * 1025 / 2;
  const double forward = tokens * (products / 0.5e15 + attention / 0.25e15) + tokens * hidden * 100 / 1e12 + 1e-3;
  EXPECT_NEAR(workload.units[7].forward, forward, 1e-9);
  EXPECT_NEAR(workload.units[7].backward, 2 * forward + 0.5 * tokens * attention / 0.25e15, 1e-9);
  EXPECT_EQ(workload.units.size(), 22u);
}

TEST(WorkloadTest, EagerAttentionComputesTheWholeSquare) {
  const Pass eager{.batch = 1, .sequence = 1024, .checkpointing = Checkpointing::kNone, .attention = Attention::kEager};
  const double hidden = 2048, products = 24 * hidden * hidden, square = 4 * hidden * 1024;
  const double forward = 1024 * (products + square) / 0.5e15 + 1024 * hidden * 100 / 1e12 + 1e-3;
  EXPECT_NEAR(Gpt2(eager).units[7].forward, forward, 1e-9);
  EXPECT_NEAR(Gpt2(eager).units[7].backward, 2 * forward, 1e-9);
}

// Else a slower step would show a higher utilisation.
TEST(WorkloadTest, TheModelsOperationsDoNotDependOnHowTheyAreComputed) {
  GpuModel gpu = kPlainGpu;
  gpu.attention_efficiency = 0.45;
  const Model model = *FindModel("gpt2-1b");
  const Workload flash = MakeWorkload(gpu, model, {.batch = 1, .sequence = 2048}, 1);
  const Workload eager = MakeWorkload(gpu, model, {.batch = 1, .sequence = 2048, .attention = Attention::kEager}, 1);
  EXPECT_GT(eager.compute_seconds(), flash.compute_seconds());
  EXPECT_EQ(eager.flops_per_step, flash.flops_per_step);
}

TEST(WorkloadTest, WhatIsNotKeptIsComputedAgainAndNotCounted) {
  const Workload none = Gpt2({.batch = 1, .sequence = 512, .checkpointing = Checkpointing::kNone});
  const Workload selective = Gpt2({.batch = 1, .sequence = 512, .checkpointing = Checkpointing::kSelective});
  const Workload full = Gpt2({.batch = 1, .sequence = 512, .checkpointing = Checkpointing::kFull});
  EXPECT_DOUBLE_EQ(full.units[1].backward, none.units[1].backward + none.units[1].forward);
  EXPECT_GT(selective.units[1].backward, none.units[1].backward);
  EXPECT_LT(selective.units[1].backward, full.units[1].backward);
  EXPECT_EQ(full.flops_per_step, none.flops_per_step);
}

TEST(WorkloadTest, AChunkedLossAddsUpTheHeadsGradientAndComputesNothingAgain) {
  Pass pass{.batch = 2, .sequence = 1024};
  const Workload whole = Gpt2(pass);
  pass.loss = Loss::kChunked;
  const Workload chunked = Gpt2(pass);
  // 50257 / 2048, rounded up, are 25 chunks of 82 tokens; 128 are the next power of two, so there are 16.
  EXPECT_NEAR(chunked.units[21].backward - whole.units[21].backward, 16 * 3 * 2 * 50257.0 * 2048 / 1e12, 1e-9);
  EXPECT_EQ(chunked.units[21].forward, whole.units[21].forward);
  EXPECT_EQ(chunked.units[20].backward, whole.units[20].backward);
  EXPECT_EQ(chunked.flops_per_step, whole.flops_per_step);
}

TEST(WorkloadTest, MicroBatchesAddUp) {
  const Pass pass{.batch = 2, .sequence = 512};
  EXPECT_DOUBLE_EQ(Gpt2(pass, 4).flops_per_step, 4 * Gpt2(pass).flops_per_step);
  EXPECT_DOUBLE_EQ(Gpt2(pass, 4).compute_seconds(), 4 * Gpt2(pass).compute_seconds());
  EXPECT_EQ(Gpt2(pass, 4).tokens_per_step(), 4096);
}

TEST(WorkloadTest, EveryElementBelongsToAUnit) {
  const Model model = *FindModel("gpt2-1b");
  const std::vector<uint64_t> elements = UnitElements(model);
  EXPECT_EQ(std::accumulate(elements.begin(), elements.end(), uint64_t{0}), ParameterCount(model));
  EXPECT_EQ(elements[0], (50257u + 2048) * 2048);
}

TEST(OutcomeTest, ExposedTimeIsWhatTheGpuDoesNotComputeInAndCausesAddUpToIt) {
  const Workload workload = Gpt2({.batch = 1, .sequence = 512});
  const double step = workload.compute_seconds() + 1;
  Machine machine;
  machine.gpu = kPlainGpu;
  const Outcome outcome = MakeOutcome(machine, workload, step, {{"verdict", 0.1}, {"parameters", 0.6}, {"no", 0}});
  EXPECT_NEAR(outcome.exposed_seconds, 1, 1e-9);
  ASSERT_EQ(outcome.exposed.size(), 3u);
  EXPECT_EQ(outcome.exposed[0].cause, "parameters");
  EXPECT_EQ(outcome.exposed[1].cause, "other");
  EXPECT_NEAR(outcome.exposed[1].seconds, 0.3, 1e-9);
  EXPECT_DOUBLE_EQ(outcome.utilisation, workload.flops_per_step / step / 1e15);
}

}  // namespace
}  // namespace superoffload::simulator
