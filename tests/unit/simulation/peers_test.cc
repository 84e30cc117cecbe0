#include "tests/simulation/peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/simulator/catalogue.h"
#include "tests/simulation/peer_memory.h"

namespace superoffload::simulator {
namespace {

using ::testing::Contains;
using ::testing::Field;

const Machine& Gh200() {
  static const auto* const machine = new Machine(*FindMachine("gh200-96-480"));
  return *machine;
}

Workload Train(const char* model, uint64_t batch, uint64_t accumulation = 1) {
  const Pass pass{.batch = batch, .sequence = 2048, .checkpointing = Checkpointing::kNone};
  return MakeWorkload(Gh200().gpu, *FindModel(model), pass, accumulation);
}

double Seconds(const Schedule& schedule, const Workload& workload, const RunOptions& options = {}) {
  return schedule.Run(Gh200(), workload, options).step_seconds;
}

TEST(PeersTest, DdpComputesAndStepsOnTheGpu) {
  const Workload workload = Train("gpt2-1b", 2, 3);
  const double step = static_cast<double>(ParameterCount(workload.model)) * 28 / Gh200().gpu.memory_bandwidth;
  EXPECT_NEAR(Seconds(*MakeDdp(), workload), workload.compute_seconds() + step, 1e-9);
}

TEST(PeersTest, ZeroOffloadExposesItsNormItsCastsAndItsWholeStep) {
  const Workload workload = Train("gpt2-5b", 2);
  const PeerCosts costs;
  const double elements = static_cast<double>(ParameterCount(workload.model));
  const Outcome outcome = MakeZeroOffload(costs)->Run(Gh200(), workload, {});
  EXPECT_GT(outcome.exposed_seconds, elements * (costs.validate + 2 * costs.cast + costs.scalar_step));
  double sum = 0;
  for (const Exposed& exposed : outcome.exposed) sum += exposed.seconds;
  EXPECT_NEAR(sum, outcome.exposed_seconds, 1e-9);
}

TEST(PeersTest, ZeroInfinityWaitsForItsLinkWhereThatIsSlow) {
  const Workload workload = Train("gpt2-1b", 1);
  PeerCosts slow, fast;
  slow.streamed_bandwidth = 1e9;
  fast.streamed_bandwidth = 400e9;
  const double bytes = static_cast<double>(ParameterCount(workload.model)) * 2;
  EXPECT_GT(Seconds(*MakeZeroInfinity(slow), workload), 2 * bytes / 1e9);
  EXPECT_LT(Seconds(*MakeZeroInfinity(fast), workload), workload.compute_seconds() + 1);
}

TEST(PeersTest, SpeculationHidesTheStepBehindALongBackward) {
  const Workload workload = Train("gpt2-2b", 8);
  PublishedFeatures features{.speculation = false, .repartition = false};
  const double without = Seconds(*MakePublishedSuperOffload(features), workload);
  features.speculation = true;
  const double with = Seconds(*MakePublishedSuperOffload(features), workload);
  features.repartition = true;
  const double whole = Seconds(*MakePublishedSuperOffload(features), workload);
  EXPECT_LT(with, without);
  EXPECT_LT(whole, with);
  EXPECT_GE(whole, workload.compute_seconds());
}

TEST(PeersTest, BucketsThatStayOnTheGpuAreSteppedThere) {
  PublishedFeatures features;
  const Workload workload = Train("gpt2-5b", 1);  // too short a backward for the CPU
  const Outcome outcome = MakePublishedSuperOffload(features)->Run(Gh200(), workload, {.timeline = true});
  EXPECT_THAT(outcome.timeline, Contains(Field(&Span::name, "optimizer step")));
}

TEST(PeersTest, AClippedStepThrowsTheNextForwardAway) {
  const Workload workload = Train("gpt2-2b", 8);
  const std::unique_ptr<Schedule> published = MakePublishedSuperOffload();
  const double never = Seconds(*published, workload), always = Seconds(*published, workload, {.clip_rate = 1});
  EXPECT_GT(always, never + workload.forward_seconds());
  EXPECT_NEAR(Seconds(*published, workload, {.clip_rate = 0.5}), (never + always) / 2, 1e-9);
  EXPECT_EQ(Seconds(*MakeZeroOffload(), workload), Seconds(*MakeZeroOffload(), workload, {.clip_rate = 1}));
}

double SecondsOf(const Outcome& outcome, std::string_view cause) {
  for (const Exposed& part : outcome.exposed) {
    if (part.cause == cause) return part.seconds;
  }
  return 0;
}

TEST(PeersTest, WhatWaitsBehindTheNormIsNotCalledTheStep) {
  const Workload workload = Train("gpt2-5b", 1);  // short: the norm of the step before is not over when backward begins
  PeerCosts fast = FastestCosts(Gh200().host.bandwidth), slow;
  const Outcome with = MakePublishedSuperOffload({}, slow)->Run(Gh200(), workload, {});
  fast.validate = 0;
  const Outcome without = MakePublishedSuperOffload({}, fast)->Run(Gh200(), workload, {});
  const double waited = SecondsOf(with, "steps that wait behind the norm on the CPU");
  EXPECT_GT(waited, 0.1);
  EXPECT_LT(SecondsOf(with, "optimizer step on the CPU"), SecondsOf(without, "optimizer step on the CPU") + 0.05);
  EXPECT_EQ(SecondsOf(without, "steps that wait behind the norm on the CPU"), 0);
  double sum = 0;
  for (const Exposed& exposed : with.exposed) sum += exposed.seconds;
  EXPECT_NEAR(sum, with.exposed_seconds, 1e-9);
}

TEST(PeersTest, RollbacksHaveTheirOwnCause) {
  const Outcome outcome = MakePublishedSuperOffload()->Run(Gh200(), Train("gpt2-2b", 8), {.clip_rate = 0.5});
  EXPECT_GT(SecondsOf(outcome, "rollbacks, and forward passes thrown away"), 0.1);
  EXPECT_EQ(SecondsOf(outcome, "other"), 0);
}

TEST(PeersTest, ARunIsTheSameEventForEvent) {
  const Workload workload = Train("gpt2-3b", 2, 4);
  for (const auto& schedule : {MakeDdp(), MakeZeroOffload(), MakeZeroInfinity(), MakePublishedSuperOffload()}) {
    const std::vector<Span> first = schedule->Run(Gh200(), workload, {.timeline = true}).timeline;
    const std::vector<Span> second = schedule->Run(Gh200(), workload, {.timeline = true}).timeline;
    ASSERT_FALSE(first.empty());
    ASSERT_EQ(first.size(), second.size());
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(first[i].begin, second[i].begin);
      EXPECT_EQ(first[i].end, second[i].end);
      EXPECT_EQ(first[i].name, second[i].name);
    }
  }
}

TEST(PeerMemoryTest, AMicroBatchDividesTheBatchAndIsTheLargestThatFits) {
  const Model model = *FindModel("gpt2-5b");
  const std::optional<MicroBatch> found = LargestMicroBatch(Peer::kSuperOffload, Gh200(), model, 12, 2048);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->pass.batch * found->accumulation, 12u);
  EXPECT_LE(PeerGpuMemory(Peer::kSuperOffload, Gh200(), model, found->pass), Gh200().gpu.memory_bytes);
  Pass larger = found->pass;
  do ++larger.batch;
  while (12 % larger.batch != 0);
  EXPECT_GT(PeerGpuMemory(Peer::kSuperOffload, Gh200(), model, larger), Gh200().gpu.memory_bytes);
}

TEST(PeerMemoryTest, TheHostsMemoryLimits) {
  Machine small = Gh200();
  small.host.memory_bytes = 50e9;
  const Model model = *FindModel("gpt2-5b");
  EXPECT_FALSE(LargestMicroBatch(Peer::kSuperOffload, small, model, 8, 2048).has_value());
}

}  // namespace
}  // namespace superoffload::simulator
