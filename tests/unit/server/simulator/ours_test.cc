#include "server/simulator/ours.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "server/simulator/catalogue.h"
#include "server/simulator/model_layout.h"
#include "server/simulator/simulated_training.h"

namespace superoffload::simulator {
namespace {

using engine::Verdict;

Machine Superchip() { return *FindMachine("gh200-96-480"); }

Workload Gpt2(uint64_t batch, uint64_t accumulation = 1) {
  return MakeWorkload(Superchip().gpu, *FindModel("gpt2-1b"), {.batch = batch, .sequence = 1024}, accumulation);
}

Outcome Train(const Workload& workload, const RunOptions& options = {}, const Ours::Settings& settings = {},
              const Machine& machine = Superchip()) {
  return Ours(settings).Run(machine, workload, options);
}

double SumOf(const std::vector<Exposed>& exposed) {
  double sum = 0;
  for (const Exposed& part : exposed) sum += part.seconds;
  return sum;
}

double SecondsOf(const std::string& cause, const Outcome& outcome) {
  for (const Exposed& part : outcome.exposed) {
    if (part.cause == cause) return part.seconds;
  }
  return 0;
}

TEST(OursTest, EveryIdleSecondOfTheGpuHasACause) {
  for (const RunOptions& options : {RunOptions{}, RunOptions{.clip_rate = 1}, RunOptions{.skip_rate = 0.1}}) {
    const Outcome outcome = Train(Gpt2(4), options);
    EXPECT_GT(outcome.exposed_seconds, 0);
    EXPECT_NEAR(SumOf(outcome.exposed), outcome.exposed_seconds, 1e-9);
    for (const Exposed& part : outcome.exposed) {
      EXPECT_GT(part.seconds, 0) << part.cause;
      EXPECT_NE(part.cause, "other");
    }
  }
}

TEST(OursTest, TheSameRunTwiceIsTheSameToTheLastBit) {
  const RunOptions options{.clip_rate = 0.3, .skip_rate = 0.2, .timeline = true};
  const Outcome a = Train(Gpt2(4), options), b = Train(Gpt2(4), options);
  EXPECT_EQ(a.step_seconds, b.step_seconds);
  ASSERT_EQ(a.timeline.size(), b.timeline.size());
  for (size_t i = 0; i < a.timeline.size(); ++i) {
    EXPECT_EQ(a.timeline[i].name, b.timeline[i].name);
    EXPECT_EQ(a.timeline[i].begin, b.timeline[i].begin);
    EXPECT_EQ(a.timeline[i].end, b.timeline[i].end);
  }
}

TEST(OursTest, AMachineWithoutLimitsExposesNothing) {
  Machine machine = Superchip();
  machine.host.bandwidth = machine.host.core_bandwidth = 1e18;
  machine.passes = {.absorb = 1e-18, .publish = 1e-18, .publish_masters = 1e-18};
  machine.h2d = machine.d2h = {{{1, 1e18}}};
  machine.gpu.memory_bandwidth = 1e18;
  const Workload workload = Gpt2(4);
  const Outcome outcome = Train(workload, {}, {}, machine);
  EXPECT_NEAR(outcome.step_seconds, workload.compute_seconds(), 1e-6);
}

TEST(OursTest, ATrainerInTheHostsMemoryWaitsForPassesOnly) {
  Machine machine = Superchip();
  machine.h2d = machine.d2h = {{{1, std::numeric_limits<double>::infinity()}}};
  machine.gpu.memory_bandwidth = std::numeric_limits<double>::infinity();
  const Outcome outcome = Train(Gpt2(1), {}, {.device_slots = 1u << 16, .sums_with_gradients = false}, machine);
  EXPECT_GT(outcome.exposed_seconds, 0);
  for (const Exposed& part : outcome.exposed) EXPECT_EQ(part.cause.find("passes"), 0u) << part.cause;
}

// Nothing is faster than the memory that every step's bytes pass through.
TEST(OursTest, AStepTakesAtLeastTheTimeOfItsBytes) {
  const Workload workload = Gpt2(1);
  const Outcome outcome = Train(workload);
  const double parameters = static_cast<double>(ParameterCount(workload.model));
  EXPECT_GE(outcome.step_seconds, 32 * parameters / Superchip().host.bandwidth);
  EXPECT_GE(outcome.step_seconds, workload.compute_seconds());
}

TEST(OursTest, ClippingExposesPublishingAndSkippingDoesNot) {
  const Workload workload = Gpt2(16);
  const Outcome clip = Train(workload, {.clip_rate = 1}), skip = Train(workload, {.skip_rate = 1});
  // Idle workers have absorbed the step before: what is left is less than both in one pass would take.
  const double bytes = static_cast<double>(ParameterCount(workload.model)) / Superchip().host.bandwidth;
  EXPECT_GT(clip.exposed.front().seconds, 0.9 * 2 * bytes);
  EXPECT_LT(clip.exposed.front().seconds, 32 * bytes);
  EXPECT_LT(skip.step_seconds, clip.step_seconds);
  EXPECT_EQ(clip.exposed.front().cause, "passes after the verdict");
}

TEST(OursTest, ARateBetweenTenthsIsNotRounded) {
  const Workload workload = Gpt2(4);
  const double never = Train(workload).step_seconds, tenth = Train(workload, {.clip_rate = 0.1}).step_seconds;
  EXPECT_GT(tenth, never);
  const Outcome rare = Train(workload, {.clip_rate = 0.02});
  EXPECT_NEAR(rare.step_seconds, never + 0.2 * (tenth - never), 1e-12);
  EXPECT_NEAR(SumOf(rare.exposed), rare.exposed_seconds, 1e-9);
  const Outcome both = Train(workload, {.clip_rate = 0.97, .skip_rate = 0.03});
  EXPECT_NEAR(SumOf(both.exposed), both.exposed_seconds, 1e-9);
}

TEST(OursTest, SlotsAndResidentsHelp) {
  const Workload workload = Gpt2(8);
  // Behind a link that is as slow as the gradients come; a Superchip's empties a slot before the next bucket is there.
  const Machine pcie = *FindMachine("h100-pcie");
  EXPECT_GT(Train(workload, {}, {.device_slots = 1}, pcie).step_seconds,
            Train(workload, {}, {.device_slots = 8}, pcie).step_seconds);
  // Their updates hold up the other buckets' parameters, so that they pay only where publishing is late.
  const RunOptions clipped{.clip_rate = 1};
  EXPECT_GT(Train(workload, clipped).step_seconds, Train(workload, clipped, {.resident_buckets = 4}).step_seconds);
}

// A block is copied up for forward and for backward, but for those that stay in their slots over the turn; what is in a
// slot when the step ends is copied once more.
TEST(OursTest, BlocksThatStreamAreCopiedTwiceAStepButForThoseInSlots) {
  const Machine machine = Superchip();
  const Workload workload = Gpt2(4);
  const auto copies = [&](const Ours::Settings& settings, size_t steps) {
    SimulatedTraining training(machine, workload, settings, std::vector<Verdict>(steps, Verdict::kCommit));
    training.Run();
    return std::ranges::count_if(training.spans(), [](const Span& span) { return span.lane == Lane::kH2D; });
  };
  const engine::Layout layout = LayoutOf(workload.model);
  const std::vector<uint32_t> units =
      StreamedUnits(workload.model.architecture, BucketUses(workload.model, layout), /*share=*/1);
  const auto stay = std::ranges::count(units, 0u);
  const auto blocks = static_cast<int64_t>(workload.model.architecture.layers);
  const auto per_block = (static_cast<int64_t>(units.size()) - stay) / blocks;
  for (const uint32_t slots : {1u, 3u}) {
    const Ours::Settings settings{.streamed_weights = 1, .stream_slots = slots};
    EXPECT_EQ(copies(settings, 5) - copies(settings, 4), stay + per_block * (2 * blocks - slots)) << slots;
  }
}

TEST(OursTest, StreamingCostsNextToNothingWhereTokensAreMany) {
  const Ours::Settings streams{.streamed_weights = 1};
  EXPECT_LT(Train(Gpt2(32), {}, streams).step_seconds, 1.05 * Train(Gpt2(32)).step_seconds);
  // They are published after the verdict.
  const Outcome few = Train(Gpt2(1), {}, streams);
  EXPECT_GT(few.step_seconds, Train(Gpt2(1)).step_seconds);
  EXPECT_GT(SecondsOf("passes after the verdict", few), SecondsOf("passes after the verdict", Train(Gpt2(1))));
}

TEST(OursTest, ASlowLinkIsWaitedForInEachPass) {
  Machine machine = Superchip();
  machine.h2d = {{{1, 1e9}}};
  const Workload workload = Gpt2(16, /*accumulation=*/2);
  const Outcome outcome = Train(workload, {}, {.streamed_weights = 1}, machine);
  const double bytes = 2.0 * static_cast<double>(ParameterCount(workload.model));
  EXPECT_GT(SecondsOf("parameters that stream", outcome), 2 * bytes / 1e9);
  EXPECT_NEAR(SumOf(outcome.exposed), outcome.exposed_seconds, 1e-9);
  EXPECT_LT(Train(workload, {}, {.streamed_weights = 0.5}, machine).step_seconds, outcome.step_seconds);
  EXPECT_EQ(SecondsOf("parameters that stream", Train(workload, {}, {}, machine)), 0);
}

Workload Offloading(Workload workload, double share) {
  workload.pass.offloaded_activations = share;
  return workload;
}

TEST(OursTest, ActivationsThatLeaveCostNextToNothing) {
  for (const uint64_t batch : {1, 32}) {
    const Workload workload = Gpt2(batch);
    EXPECT_LT(Train(Offloading(workload, 1)).step_seconds, 1.02 * Train(workload).step_seconds);
  }
}

TEST(OursTest, OverASlowLinkEachActivationIsWaitedFor) {
  Machine machine = Superchip();
  machine.h2d = {{{1, 1e8}}};
  const Workload workload = Gpt2(16, /*accumulation=*/2);
  const double input = BlockInputBytes(workload.model.architecture, workload.pass) / 1e8;
  const Outcome stays = Train(workload, {}, {}, machine);
  EXPECT_EQ(SecondsOf("activations' way back", stays), 0);
  for (const double share : {0.25, 1.0}) {
    const Outcome leaves = Train(Offloading(workload, share), {}, {}, machine);
    const auto blocks =
        static_cast<double>(OffloadedBlocks(workload.model.architecture, Offloading(workload, share).pass));
    const double waited = SecondsOf("activations' way back", leaves);
    EXPECT_LE(waited, 2 * blocks * input);
    EXPECT_GT(waited, 2 * blocks * (input - workload.backward_seconds() / 24)) << "each but for one block's backward";
    EXPECT_NEAR(SumOf(leaves.exposed), leaves.exposed_seconds, 1e-9);
  }
}

TEST(OursTest, OfRanksTooActivationsLeave) {
  const Machine machine = Superchip();
  Workload workload = Gpt2(4);
  workload.ranks = 2;
  const auto copies = [&](double share) {
    const Workload leaving = Offloading(workload, share);
    SimulatedTraining training(machine, leaving, {}, {Verdict::kCommit});
    training.Run();
    return std::ranges::count_if(training.spans(), [](const Span& span) { return span.name.starts_with("input "); });
  };
  EXPECT_EQ(copies(0), 0);
  EXPECT_EQ(copies(1), 2 * static_cast<int64_t>(workload.model.architecture.layers));
}

// Until it is full a log takes gradients that nobody has time to absorb.
TEST(OursTest, StepsWithLogsLastAsLongAsAbsorbingThem) {
  Machine machine = Superchip();
  machine.passes.absorb *= 20;
  const Workload workload = Gpt2(4);
  const double absorbing = static_cast<double>(ParameterCount(workload.model)) * machine.passes.absorb /
                           static_cast<double>(machine.worker_cores());
  for (const uint32_t log_slots : {3, 5, 9}) {
    for (const RunOptions& options : {RunOptions{}, RunOptions{.clip_rate = 1}}) {
      const Outcome outcome = Train(workload, options, {.resident_buckets = 16, .log_slots = log_slots}, machine);
      EXPECT_GT(outcome.step_seconds, 0.99 * absorbing) << log_slots;
      EXPECT_NEAR(SumOf(outcome.exposed), outcome.exposed_seconds, 1e-9);
    }
  }
}

// The buckets that forward reads first are published last: copies that were issued earlier hold them up.
TEST(OursTest, UploadsThatWaitForWhatIsNeededEarlierExposeLess) {
  constexpr size_t kAllAtOnce = std::numeric_limits<size_t>::max();
  for (const RunOptions& options : {RunOptions{}, RunOptions{.clip_rate = 1}, RunOptions{.skip_rate = 0.1}}) {
    const Outcome few = Train(Gpt2(16), options), all = Train(Gpt2(16), options, {.uploads_in_flight = kAllAtOnce});
    EXPECT_LE(few.exposed_seconds, all.exposed_seconds);
    EXPECT_LT(SecondsOf("parameters' way back", few), 0.75 * SecondsOf("parameters' way back", all) + 1e-3);
  }
  EXPECT_LT(Train(Gpt2(16)).exposed_seconds, Train(Gpt2(16), {}, {.uploads_in_flight = kAllAtOnce}).exposed_seconds);
}

TEST(OursTest, AnAlgorithmWithLessStateHasShorterPasses) {
  for (const double clip_rate : {0, 1}) {
    double before = std::numeric_limits<double>::infinity();
    for (const char* name : {"adamw", "adamw_bf16_nearest", "lion_bf16_nearest"}) {
      const double seconds =
          Train(Gpt2(1), {.clip_rate = clip_rate}, {.algorithm = kernels::FindAlgorithm(name)}).step_seconds;
      EXPECT_LT(seconds, before) << name;
      before = seconds;
    }
    EXPECT_GT(Train(Gpt2(1), {.clip_rate = clip_rate}, {.algorithm = kernels::FindAlgorithm("lion_8bit")}).step_seconds,
              before)
        << "codes take more to compute than their bytes save on Grace";
  }
}

TEST(OursTest, OnlyTheLastMicroBatchSubmits) {
  const Outcome one = Train(Gpt2(4)), four = Train(Gpt2(4, 4));
  EXPECT_LT(four.exposed_seconds, one.exposed_seconds * 1.01);
  EXPECT_GT(four.utilisation, one.utilisation);
}

TEST(OursTest, GradientsThatAreAddedUpOnTheHostMoveTwicePerPass) {
  const Machine machine = Superchip();
  const auto copies = [&](uint64_t passes, bool sums_on_host, Lane lane) {
    const Workload workload = Gpt2(4, passes);
    SimulatedTraining training(machine, workload, {.sums_on_host = sums_on_host}, {Verdict::kCommit});
    training.Run();
    return std::ranges::count_if(training.spans(),
                                 [&](const Span& span) { return span.lane == lane && span.name == "sum"; });
  };
  const auto buckets = static_cast<int64_t>(LayoutOf(Gpt2(4).model).buckets.size());
  EXPECT_EQ(copies(3, false, Lane::kD2H), 0);
  EXPECT_EQ(copies(1, true, Lane::kD2H), 0);
  EXPECT_EQ(copies(3, true, Lane::kD2H), 2 * buckets);
  EXPECT_EQ(copies(3, true, Lane::kH2D), 2 * buckets);
  const double on_gpu = Train(Gpt2(16, 4)).step_seconds;
  EXPECT_LT(Train(Gpt2(16, 4), {}, {.sums_on_host = true}).step_seconds, 1.05 * on_gpu);
}

TEST(OursTest, TheTimelineHasEveryLane) {
  const Outcome outcome = Train(Gpt2(4), {.timeline = true});
  std::set<Lane> lanes;
  for (const Span& span : outcome.timeline) {
    EXPECT_LE(span.begin, span.end) << span.name;
    EXPECT_GE(span.begin, 0) << span.name;
    lanes.insert(span.lane);
  }
  EXPECT_EQ(lanes.size(), 7u);  // one rank has no network
  EXPECT_TRUE(Train(Gpt2(4)).timeline.empty());
}

TEST(OursTest, TheTimelineIsTwoWholeStepsWithTheirExposedTime) {
  const Outcome outcome = Train(Gpt2(1), {.timeline = true});
  ASSERT_GT(outcome.exposed_seconds, 0);
  double exposed = 0, computed = 0, end = 0;
  std::vector<Span> steps;
  for (const Span& span : outcome.timeline) {
    if (span.lane == Lane::kStep) steps.push_back(span);
    if (span.lane == Lane::kExposed) exposed += span.end - span.begin;
    if (span.name.starts_with("forward") || span.name.starts_with("backward")) computed += span.end - span.begin;
    end = std::max(end, span.end);
  }
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].begin, 0);
  EXPECT_EQ(steps[0].end, steps[1].begin);
  EXPECT_EQ(steps[1].end, end);
  EXPECT_NE(steps[0].name, steps[1].name);
  EXPECT_NEAR(end, 2 * outcome.step_seconds, 1e-6 * end);
  EXPECT_NEAR(exposed, 2 * outcome.exposed_seconds, 1e-6 * end);
  EXPECT_NEAR(exposed + computed, end, 1e-6 * end);
}

// The others have nothing to say, and the host's work is theirs as well.
TEST(OursTest, RanksWithAFastNetworkExposeLessThanOneAlone) {
  Machine machine = Superchip();
  machine.network = {.node_ranks = 4,
                     .node_bandwidth = 1e18,
                     .bandwidth = 1e18,
                     .collective_seconds = 1e-12,
                     .agreement_seconds = 1e-12};
  Workload workload = Gpt2(1);
  const Outcome alone = Train(workload, {}, {}, machine);
  workload.ranks = 4;
  const Outcome ranks = Train(workload, {}, {}, machine);
  EXPECT_LT(ranks.exposed_seconds, 0.5 * alone.exposed_seconds);
  EXPECT_NEAR(ranks.tokens_per_second, 4 * 1024 / ranks.step_seconds, 1e-6);
  EXPECT_EQ(SecondsOf("gathering parameters from ranks", alone), 0);
}

TEST(OursTest, RanksTakeAtLeastTheTimeOfTheirCollectives) {
  Machine machine = Superchip();
  machine.network.node_bandwidth = 10e9;
  for (const uint64_t accumulation : {1, 3}) {
    Workload workload = Gpt2(1, accumulation);
    workload.ranks = 4;
    const Outcome outcome = Train(workload, {}, {}, machine);
    const std::vector<uint64_t> elements = UnitElements(workload.model);
    double bytes = 0;  // gathered in forward, but for the last unit in backward, and reduced; two bytes per element
    for (const uint64_t unit : elements) bytes += 3 * 2.0 * static_cast<double>(unit);
    bytes -= 2.0 * static_cast<double>(elements.back());
    const double least = static_cast<double>(accumulation) * bytes * 0.75 / 10e9;
    EXPECT_GT(outcome.step_seconds, least);
    EXPECT_LT(outcome.step_seconds, 1.2 * least) << "all else hides behind them";
    EXPECT_EQ(outcome.exposed.front().cause, "gathering parameters from ranks");
  }
}

TEST(OursTest, OfRanksTooEveryIdleSecondHasACause) {
  Workload workload = Gpt2(4, 2);
  workload.ranks = 8;  // of two nodes
  for (const RunOptions& options : {RunOptions{}, RunOptions{.clip_rate = 1}, RunOptions{.skip_rate = 0.1}}) {
    const Outcome outcome = Train(workload, options);
    EXPECT_NEAR(SumOf(outcome.exposed), outcome.exposed_seconds, 1e-9);
    for (const Exposed& part : outcome.exposed) EXPECT_NE(part.cause, "other");
  }
}

TEST(OursTest, AnAgreementIsWaitedForOnceAStep) {
  Workload workload = Gpt2(1);
  workload.ranks = 2;
  Machine machine = Superchip();
  machine.network.agreement_seconds = 0.5;
  const Outcome outcome = Train(workload, {.clip_rate = 0.2, .skip_rate = 0.2}, {}, machine);
  EXPECT_NEAR(SecondsOf("the ranks' agreement", outcome), 0.5, 1e-6);
}

TEST(SimulatedTrainingTest, TheEngineDecidesWhatTheGradientsSay) {
  const std::vector<Verdict> verdicts = {Verdict::kCommit, Verdict::kClip,          Verdict::kSkipNonFinite,
                                         Verdict::kClip,   Verdict::kSkipNonFinite, Verdict::kCommit};
  const Machine machine = Superchip();
  Workload workload = Gpt2(2);
  for (const uint32_t ranks : {1, 2}) {
    workload.ranks = ranks;
    SimulatedTraining training(machine, workload, {}, verdicts);
    training.Run();
    ASSERT_EQ(training.steps().size(), verdicts.size());
    for (size_t i = 0; i < verdicts.size(); ++i) EXPECT_EQ(training.steps()[i].verdict, verdicts[i]) << i;
  }
}

}  // namespace
}  // namespace superoffload::simulator
