#include "server/plan/answer.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/optimizer/hosted_memory.h"
#include "server/plan/memory_plan.h"
#include "server/simulator/model_layout.h"

namespace superoffload::plan {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

v1::PlanRequest Request(const std::string& model, uint32_t batch = 4, uint32_t sequence = 2048) {
  v1::PlanRequest request;
  request.set_model_name(model);
  request.set_machine_name("gh200-96-480");
  request.set_batch(batch);
  request.set_sequence(sequence);
  request.set_quick(true);
  request.set_resident_buckets(0);
  return request;
}

// On a machine whose host has memory for everything, and that comes alone.
v1::PlanRequest OfASmallGpu(const std::string& model, uint32_t sequence) {
  v1::PlanRequest request = Request(model, 1, sequence);
  request.set_loss(v1::LOSS_CHUNKED);
  request.clear_machine_name();
  v1::MachineDescription& machine = *request.mutable_machine();
  machine.set_like("gh200-96-480");
  machine.mutable_gpu()->set_memory_bytes(60e9);
  machine.mutable_host()->set_memory_bytes(2e12);
  machine.mutable_network()->set_most_ranks(1);
  return request;
}

// Of rank 0; one of no bytes where there is none.
v1::MemoryItem HostItem(const v1::PlanResponse& response, const std::string& purpose) {
  for (const v1::MemoryItem& item : response.memory(0).host().items()) {
    if (item.purpose() == purpose) return item;
  }
  return v1::MemoryItem();
}

// A model whose logits take less than its blocks.
v1::Architecture SmallVocabulary() {
  v1::Architecture a;
  a.set_layers(32), a.set_hidden(4096), a.set_query_heads(32), a.set_feed_forward(14336), a.set_vocabulary(1000);
  return a;
}

std::string Refusal(const v1::PlanRequest& request) {
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  return response.ok() ? "" : std::string(response.status().message());
}

TEST(AnswerTest, TheHostsMemoryIsWhatTheDaemonWouldCharge) {
  const v1::PlanRequest request = Request("gpt-oss-20b");
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  ASSERT_TRUE(response.ok()) << response.status();
  const Question question = *ToQuestion(request);
  const engine::Layout layout = *engine::PlanLayout(simulator::ShardOf(question.spec, 0, 1));
  EXPECT_EQ(response->memory(0).host().total_bytes(),
            optimizer::HostedMemory::Use(layout, question.spec).total_bytes());
  EXPECT_EQ(response->buckets(), layout.buckets.size());
  uint64_t sum = 0;
  for (const v1::MemoryItem& item : response->memory(0).host().items()) sum += item.bytes();
  EXPECT_EQ(sum, response->memory(0).host().total_bytes());
}

TEST(AnswerTest, EveryAssumptionIsASentenceWithItsSource) {
  const absl::StatusOr<v1::PlanResponse> response = Answer(Request("llama-8b"));
  ASSERT_TRUE(response.ok()) << response.status();
  for (const std::string& sentence : response->assumptions()) EXPECT_TRUE(sentence.ends_with(".")) << sentence;
  EXPECT_THAT(response->assumptions(), Contains(HasSubstr("host.bandwidth is ")));
  EXPECT_THAT(response->assumptions(), Contains(HasSubstr("Korthikanti")));
  EXPECT_THAT(response->assumptions(), Not(Contains(HasSubstr("(given)"))));
}

TEST(AnswerTest, AGivenNumberReplacesTheKnownMachines) {
  v1::PlanRequest request = Request("llama-8b");
  request.clear_machine_name();
  request.mutable_machine()->set_like("gh200-144");
  request.mutable_machine()->mutable_host()->set_bandwidth(200e9);
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(response->assumptions(), Contains("host.bandwidth is 200 GB/s (given)."));
  EXPECT_EQ(response->memory(0).gpu().available_bytes(), uint64_t{1425} * (1 << 29) / 5);  // 142.5 GiB
}

TEST(AnswerTest, OneMemoryHoldsTheSumOfBoth) {
  v1::PlanRequest request = Request("gpt2-2b", 1);
  request.set_machine_name("dgx-spark");
  const absl::StatusOr<v1::PlanResponse> fits = Answer(request);
  ASSERT_TRUE(fits.ok()) << fits.status();
  const uint64_t memory = static_cast<uint64_t>(simulator::FindMachine("dgx-spark")->gpu.memory_bytes);
  EXPECT_EQ(fits->memory(0).gpu().available_bytes() + fits->memory(0).host().total_bytes(), memory);
  EXPECT_TRUE(fits->has_performance());
  // 14 and 18 bytes per element would each fit alone.
  request.set_model_name("gpt2-5b");
  request.set_batch(4);
  request.set_sequence(2048);
  request.set_checkpointing(v1::ACTIVATION_CHECKPOINTING_NONE);
  const absl::StatusOr<v1::PlanResponse> both = Answer(request);
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_LT(both->memory(0).gpu().total_bytes(), memory);
  EXPECT_TRUE(both->memory(0).host().fits());
  EXPECT_GT(both->memory(0).gpu().total_bytes() + both->memory(0).host().total_bytes(), memory);
  EXPECT_FALSE(both->memory(0).gpu().fits());
  EXPECT_THAT(both->report(), HasSubstr("GPU memory, of what the optimizer leaves: "));
  EXPECT_THAT(both->performance_unknown(), HasSubstr("the memory of GPU and host"));
}

TEST(AnswerTest, WhereSourcesDisagreeTheStepIsGivenForBothEnds) {
  v1::PlanRequest request = Request("llama-8b", 4, 2048);
  request.set_quick(false);
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(response->assumptions(), Contains(HasSubstr("range 288 to 368 GB/s")));
  EXPECT_THAT(response->assumptions(),
              Contains(AllOf(HasSubstr("With the least that sources give (host.bandwidth 288 GB/s"),
                             HasSubstr(" a step takes "))));
  EXPECT_THAT(response->assumptions(), Contains(HasSubstr("With the GPU numbers that the SuperOffload paper's rows")));
}

TEST(AnswerTest, WhatMakesAStepShorterIsNamed) {
  v1::PlanRequest request = Request("gpt-oss-20b", 1, 8192);
  request.set_accumulation(4);
  request.set_sums_on_host(true);
  request.set_loss(v1::LOSS_CHUNKED);
  request.set_attention(v1::ATTENTION_IMPLEMENTATION_EAGER);
  request.clear_resident_buckets();
  request.set_clipping(true);
  request.set_quick(false);
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(response->recommendation().sentences(),
              Contains(HasSubstr("With gradient_slots=1 (GpuOptions) a step takes")));
}

TEST(AnswerTest, AMachineWithoutAModelMustBeWhole) {
  v1::PlanRequest request = Request("llama-8b");
  request.clear_machine_name();
  request.mutable_machine()->set_name("mine");
  EXPECT_THAT(Refusal(request), HasSubstr("gpu.peak_flops of machine 'mine' is 0"));
  EXPECT_THAT(Refusal(request), HasSubstr("`like`"));
}

TEST(AnswerTest, RanksShareTheParameters) {
  v1::PlanRequest request = Request("llama-70b", 1);
  const uint64_t alone = Answer(request)->memory(0).host().total_bytes();
  request.set_ranks(4);
  const absl::StatusOr<v1::PlanResponse> response = Answer(request);
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_EQ(response->memory_size(), 4);
  uint64_t sum = 0;
  for (const v1::RankMemory& rank : response->memory()) sum += rank.host().total_bytes();
  EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(alone), 0.001 * static_cast<double>(alone));
  ASSERT_TRUE(response->has_performance());
  EXPECT_NEAR(response->performance().tokens_per_second() * response->performance().step_seconds(), 4 * 2048, 1e-6);
}

TEST(AnswerTest, OnlyRanksNeedANetwork) {
  v1::PlanRequest request = Request("gpt2-1b");
  EXPECT_THAT(Answer(request)->assumptions(), Not(Contains(HasSubstr("network."))));
  request.set_ranks(2);
  EXPECT_THAT(Answer(request)->assumptions(), Contains(HasSubstr("network.node_bandwidth is 340 GB/s")));
  request.clear_machine_name();
  request.mutable_machine()->set_like("gh200-96-480");
  request.mutable_machine()->mutable_network()->set_node_ranks(1);
  request.mutable_machine()->mutable_network()->set_bandwidth(50e9);
  const v1::PlanResponse adapters = *Answer(request);
  EXPECT_THAT(adapters.assumptions(), Contains("network.bandwidth is 50 GB/s (given)."));
  request.mutable_machine()->mutable_network()->set_bandwidth(5e9);
  EXPECT_GT(Answer(request)->performance().step_seconds(), adapters.performance().step_seconds());
  request.mutable_machine()->mutable_network()->set_bandwidth(-1);
  EXPECT_THAT(Refusal(request), HasSubstr("network.bandwidth of machine 'gh200-96-480' is -1"));
  request.set_ranks(1);
  EXPECT_TRUE(Answer(request).ok());
}

TEST(RecommendationTest, WhatFitsStaysAsItIs) {
  const v1::Recommendation recommendation = Answer(Request("llama-8b"))->recommendation();
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT);
  EXPECT_EQ(recommendation.ranks(), 1u);
}

TEST(RecommendationTest, ABudgetThatIsTooSmallByALittleIsRaised) {
  v1::PlanRequest request = Request("gpt2-25b");
  request.set_gradient_slots(2);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("memory_budget_bytes")));
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("overlap=True")));
}

// 25 B parameters take 18 bytes each, or 16.
TEST(RecommendationTest, OneGradientSlotIsTakenWhereTwoDoNotFitAndItsPriceIsSaid) {
  const v1::PlanRequest request = Request("gpt2-25b");
  const auto slots_of = [](const v1::PlanResponse& response) { return HostItem(response, "gradient slots"); };
  const v1::PlanResponse one = *Answer(request);
  EXPECT_TRUE(one.memory(0).host().fits());
  EXPECT_THAT(slots_of(one).formula(), HasSubstr("1 slot"));
  v1::PlanRequest two = request;
  two.set_gradient_slots(2);
  const v1::PlanResponse refused = *Answer(two);
  EXPECT_FALSE(refused.memory(0).host().fits());
  EXPECT_EQ(slots_of(refused).bytes(), 2 * slots_of(one).bytes());
  EXPECT_THAT(one.recommendation().sentences(), Contains(HasSubstr("one gradient slot")));
  const v1::PlanResponse small = *Answer(Request("llama-8b"));
  EXPECT_THAT(slots_of(small).formula(), HasSubstr("2 slots"));
  EXPECT_THAT(small.recommendation().sentences(), Not(Contains(HasSubstr("one gradient slot"))));
  two.set_gradient_slots(3);
  EXPECT_THAT(Refusal(two), HasSubstr("gradient_slots"));
}

// They take 14 bytes each, or 16.
TEST(RecommendationTest, ParametersAreInPlaceWhereOneSlotDoesNotFit) {
  v1::PlanRequest request = Request("gpt2-25b");
  request.clear_machine_name();
  request.mutable_machine()->set_like("gh200-96-480");
  request.mutable_machine()->mutable_host()->set_memory_bytes(450e9);
  const auto published_bytes = [](const v1::PlanResponse& response) {
    return HostItem(response, "published parameters").bytes();
  };
  const v1::PlanResponse in_place = *Answer(request);
  EXPECT_TRUE(in_place.memory(0).host().fits());
  EXPECT_EQ(published_bytes(in_place), 1u);
  EXPECT_THAT(in_place.recommendation().sentences(), Contains(HasSubstr("into which parameters are published")));
  request.set_resident_buckets(4);
  EXPECT_EQ(published_bytes(*Answer(request)), 1u) << "without logs";
  request.set_resident_buckets(0);
  request.set_gradient_slots(1);
  const v1::PlanResponse one = *Answer(request);
  EXPECT_FALSE(one.memory(0).host().fits());
  EXPECT_GT(published_bytes(one), 1u);
  request.set_in_place(true);
  EXPECT_EQ(published_bytes(*Answer(request)), 1u);
  request.set_gradient_slots(2);
  EXPECT_THAT(Refusal(request), HasSubstr("in_place needs one gradient slot"));
  request.set_gradient_slots(0);
  request.set_algorithm("test_momentum_matrix");
  EXPECT_THAT(Refusal(request), HasSubstr("an algorithm that updates elements"));
}

// A pass in place moves fewer bytes, and nothing hides those of one slot.
TEST(RecommendationTest, ParametersInPlaceAreRecommendedWhereThatIsFaster) {
  for (const uint32_t batch : {1, 8}) {
    v1::PlanRequest request = Request("gpt2-25b", batch);
    request.set_quick(false);
    const v1::PlanResponse response = *Answer(request);
    const std::string sentences = absl::StrJoin(response.recommendation().sentences(), "\n");
    EXPECT_EQ(absl::StrContains(sentences, "gradient_slots=\"in_place\""), batch == 1) << sentences;
  }
}

// Nothing of the step waits for a slot that is there.
TEST(RecommendationTest, OneSlotCostsTimeWhereTheHostIsSlow) {
  v1::PlanRequest request = Request("llama-8b", 1, 2048);
  request.set_quick(true);
  const double two = Answer(request)->performance().step_seconds();
  request.set_gradient_slots(1);
  EXPECT_GT(Answer(request)->performance().step_seconds(), two);
}

TEST(RecommendationTest, AHostThatIsTooSmallNeedsRanks) {
  const v1::Recommendation recommendation = Answer(Request("llama-70b"))->recommendation();
  EXPECT_EQ(recommendation.ranks(), 3u);
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT);  // on each of them
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("--ranks=3")));
}

TEST(RecommendationTest, WeightsThatDoNotFitAreSharedByRanks) {
  v1::PlanRequest request = Request("seed-oss-36b", 1);
  request.clear_machine_name();
  request.mutable_machine()->set_like("h100-pcie");
  request.mutable_machine()->mutable_gpu()->set_memory_bytes(40e9);
  request.mutable_machine()->mutable_host()->set_memory_bytes(2e12);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT) << "behind PCIe a pass mostly waits";
  EXPECT_EQ(recommendation.streamed_fraction(), 0);
  EXPECT_GT(recommendation.ranks(), 1u);
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("On one rank weights stream")));
  request.set_ranks(recommendation.ranks());
  EXPECT_TRUE(Answer(request)->memory(0).gpu().fits());
  EXPECT_TRUE(Answer(request)->has_performance());
}

TEST(RecommendationTest, AsFewBlocksStreamAsMemoryDemands) {
  v1::PlanRequest request = OfASmallGpu("seed-oss-36b", 32768);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_STREAMED);
  EXPECT_EQ(recommendation.ranks(), 1u);
  const double share = recommendation.streamed_fraction();
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr(absl::StrFormat("--streamed_weights=%g", share))));
  request.set_streamed_weights(share);
  const v1::PlanResponse followed = *Answer(request);
  EXPECT_TRUE(followed.memory(0).gpu().fits());
  EXPECT_GT(followed.performance().step_seconds(), 0);
  request.set_streamed_weights(share - 1.0 / 64);  // one block less
  EXPECT_FALSE(Answer(request)->memory(0).gpu().fits());
}

TEST(RecommendationTest, AsManyActivationsLeaveAsMemoryDemands) {
  v1::PlanRequest request = Request("llama-8b", 64, 4096);
  request.set_loss(v1::LOSS_CHUNKED);
  const v1::PlanResponse asked = *Answer(request);
  const double share = asked.recommendation().offloaded_activations();
  EXPECT_EQ(asked.recommendation().weights(), v1::Recommendation::WEIGHTS_RESIDENT);
  EXPECT_THAT(asked.recommendation().sentences(),
              Contains(AllOf(HasSubstr(absl::StrFormat("--offloaded_activations=%g", share)),
                             HasSubstr("superoffload.torch.offload_activations(model, optimizer)"))));
  request.set_offloaded_activations(share);
  const v1::PlanResponse followed = *Answer(request);
  EXPECT_TRUE(followed.memory(0).gpu().fits());
  EXPECT_GT(followed.performance().step_seconds(), 0);
  EXPECT_THAT(followed.assumptions(), Contains(HasSubstr("wait on the host")));
  const uint64_t lent = followed.memory(0).host().total_bytes() - asked.memory(0).host().total_bytes();
  EXPECT_EQ(lent, std::ceil(32 * share) * 64 * 4096 * 2 * 4096);
  request.set_offloaded_activations(share - 1.0 / 32);
  EXPECT_FALSE(Answer(request)->memory(0).gpu().fits());
}

TEST(RecommendationTest, ActivationsThatTheHostCannotHoldDoNotLeave) {
  v1::PlanRequest request = Request("llama-8b", 64, 4096);
  request.clear_machine_name();
  request.mutable_machine()->set_like("gh200-96-480");
  request.mutable_machine()->mutable_host()->set_memory_bytes(200e9);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.offloaded_activations(), 0);
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("Use a batch of ")));
}

TEST(RecommendationTest, WeightsStreamAndActivationsLeaveWhereNeitherSuffices) {
  v1::PlanRequest request = OfASmallGpu("seed-oss-36b", 65536);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_STREAMED);
  EXPECT_EQ(recommendation.offloaded_activations(), 1);
  request.set_streamed_weights(recommendation.streamed_fraction());
  EXPECT_FALSE(Answer(request)->memory(0).gpu().fits());
  request.set_offloaded_activations(1);
  EXPECT_TRUE(Answer(request)->memory(0).gpu().fits());
}

TEST(AnswerTest, WhatActivationsDoNotLeaveWithIsRefused) {
  v1::PlanRequest request = Request("llama-8b");
  request.set_offloaded_activations(-1);
  EXPECT_THAT(Refusal(request), HasSubstr("offloaded_activations is -1 but must be 0 to 1"));
  request.set_offloaded_activations(1);
  EXPECT_EQ(Refusal(request), "");
  request.set_checkpointing(v1::ACTIVATION_CHECKPOINTING_NONE);
  EXPECT_THAT(Refusal(request), HasSubstr("only inputs of checkpointed blocks leave"));
  request.clear_checkpointing();
  request.set_machine_name("dgx-spark");
  EXPECT_THAT(Refusal(request), HasSubstr("GPU and host of dgx-spark have one memory"));
}

TEST(AnswerTest, SumsOnTheHostMakeRoomWherePassesAreAccumulated) {
  v1::PlanRequest request = Request("gpt2-25b", 1);
  request.set_accumulation(4);
  EXPECT_FALSE(Answer(request)->memory(0).gpu().fits());
  request.set_sums_on_host(true);
  const v1::PlanResponse answer = *Answer(request);
  EXPECT_TRUE(answer.memory(0).gpu().fits());
  EXPECT_TRUE(answer.has_performance());
  EXPECT_THAT(answer.recommendation().sentences(), Not(Contains(HasSubstr("overlap"))));
  request.set_in_place(true);
  EXPECT_THAT(Refusal(request), HasSubstr("not added up on the host with in_place"));
  request.set_in_place(false);
  request.set_ranks(2);
  EXPECT_THAT(Refusal(request), HasSubstr("not added up on the host with ranks above 1"));
}

// What client/python/superoffload/torch/gpu/README.md says of it.
TEST(AnswerTest, ShardsStreamToTheirGathersForNextToNothing) {
  v1::PlanRequest request = Request("llama-70b", 1, 4096);
  request.set_ranks(4);
  request.set_loss(v1::LOSS_CHUNKED);
  const v1::PlanResponse stay = *Answer(request);
  request.set_streamed_weights(1);
  const v1::PlanResponse stream = *Answer(request);
  const uint64_t saved = stay.memory(0).gpu().total_bytes() - stream.memory(0).gpu().total_bytes();
  EXPECT_NEAR(std::ldexp(static_cast<double>(saved), -30), 31, 0.5);
  EXPECT_NEAR(static_cast<double>(stay.largest().sequence()) / 1e3, 29, 0.5);
  EXPECT_NEAR(static_cast<double>(stream.largest().sequence()) / 1e3, 46, 0.5);
  EXPECT_LT(stream.performance().step_seconds(), 1.002 * stay.performance().step_seconds());
}

TEST(AnswerTest, RanksWhoseShardsDoNotFitAreToldToStreamThem) {
  v1::PlanRequest request = Request("llama-70b", 1, 32768);
  request.set_ranks(2);
  request.set_algorithm("adamw_8bit");
  request.set_loss(v1::LOSS_CHUNKED);
  const v1::PlanResponse answer = *Answer(request);
  EXPECT_FALSE(answer.memory(0).gpu().fits());
  EXPECT_THAT(answer.recommendation().sentences(), Contains(HasSubstr("On 2 ranks the weights' shards stream")));
}

// What client/python/superoffload/torch/gpu/README.md says of it.
TEST(AnswerTest, SumsOnTheHostCostLittleOfAStep) {
  v1::PlanRequest request = Request("qwen3-14b", 8, 1024);
  request.set_accumulation(8);
  const v1::PlanResponse on_gpu = *Answer(request);
  request.set_sums_on_host(true);
  const v1::PlanResponse on_host = *Answer(request);
  const uint64_t saved = on_gpu.memory(0).gpu().total_bytes() - on_host.memory(0).gpu().total_bytes();
  EXPECT_NEAR(std::ldexp(static_cast<double>(saved), -30), 26, 0.5);
  const double longer = on_host.performance().step_seconds() / on_gpu.performance().step_seconds();
  EXPECT_GT(longer, 1);
  EXPECT_LT(longer, 1.012);
}

TEST(AnswerTest, WhatWeightsDoNotStreamWithIsRefused) {
  v1::PlanRequest request = Request("llama-8b");
  request.set_streamed_weights(1.5);
  EXPECT_THAT(Refusal(request), HasSubstr("streamed_weights is 1.5 but must be 0 to 1"));
  request.set_streamed_weights(0.5);
  EXPECT_EQ(Refusal(request), "");
  request.set_stream_slots(65);
  EXPECT_THAT(Refusal(request), HasSubstr("stream_slots is 65"));
  request.set_stream_slots(2);
  request.set_in_place(true);
  EXPECT_THAT(Refusal(request), HasSubstr("do not stream with in_place"));
  request.set_in_place(false);
  request.set_resident_buckets(4);
  EXPECT_THAT(Refusal(request), HasSubstr("do not stream with resident_buckets"));
  request.set_resident_buckets(0);
  request.clear_model_name();
  *request.mutable_model()->mutable_architecture() = SmallVocabulary();
  request.mutable_model()->mutable_architecture()->set_hidden(256);
  request.mutable_model()->mutable_architecture()->set_feed_forward(512);
  EXPECT_THAT(Refusal(request), HasSubstr("streams no blocks of less than 4 MiB"));
}

TEST(RecommendationTest, WhatNoNumberOfRanksHoldsIsSaid) {
  v1::PlanRequest request = Request("llama-8b", 1, 4'000'000);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.offloaded_activations(), 0);
  EXPECT_EQ(recommendation.ranks(), 1u);
  EXPECT_THAT(recommendation.sentences(),
              Contains(HasSubstr("Neither more ranks nor weights that stream nor activations that leave make room")));
}

TEST(RecommendationTest, ASmallerBatchOrCheckpointsMakeRoom) {
  v1::PlanRequest request = Request("llama-8b", 64, 4096);
  const v1::PlanResponse batch = *Answer(request);
  EXPECT_FALSE(batch.memory(0).gpu().fits());
  EXPECT_THAT(batch.recommendation().sentences(),
              Contains(HasSubstr("batch of " + std::to_string(batch.largest().chunked_loss_batch()))));
  request.set_batch(2);
  request.set_sequence(16384);
  request.set_checkpointing(v1::ACTIVATION_CHECKPOINTING_NONE);
  EXPECT_THAT(Answer(request)->recommendation().sentences(), Contains(HasSubstr("Checkpoint")));
}

TEST(RecommendationTest, AChunkedLossComesBeforeRanksAndStreaming) {
  v1::PlanRequest request = Request("gpt-oss-20b", 1, 32768);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.loss(), v1::LOSS_CHUNKED);
  EXPECT_EQ(recommendation.ranks(), 1u);
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT);
  EXPECT_THAT(
      recommendation.sentences(),
      ElementsAre(HasSubstr("HBM lacks"), AllOf(HasSubstr("--loss=chunked"), HasSubstr("saves 53.6 GiB"),
                                                HasSubstr("61.4 GiB of logits"), HasSubstr("use_liger_kernel=True"))));
  request.set_loss(v1::LOSS_CHUNKED);
  const v1::PlanResponse followed = *Answer(request);
  EXPECT_TRUE(followed.memory(0).gpu().fits());
  EXPECT_TRUE(followed.has_performance());
  EXPECT_EQ(followed.recommendation().loss(), v1::LOSS_CHUNKED);
  EXPECT_THAT(followed.recommendation().sentences(), Not(Contains(HasSubstr("--loss"))));
}

TEST(RecommendationTest, AChunkedLossThatDoesNotSufficeIsPartOfWhatDoes) {
  v1::PlanRequest request = Request("llama-8b", 64, 4096);
  const v1::PlanResponse asked = *Answer(request);
  EXPECT_EQ(asked.recommendation().loss(), v1::LOSS_CHUNKED);
  EXPECT_GT(asked.largest().chunked_loss_batch(), 2 * asked.largest().batch());
  EXPECT_GT(asked.largest().chunked_loss_sequence(), 2 * asked.largest().sequence());
  EXPECT_THAT(asked.report(), HasSubstr("with a chunked loss (--loss=chunked): batch "));
  const std::string batch = "batch of " + std::to_string(asked.largest().chunked_loss_batch());
  EXPECT_THAT(asked.recommendation().sentences(), Contains(HasSubstr(batch)));
  request.set_loss(v1::LOSS_CHUNKED);
  request.set_batch(asked.largest().chunked_loss_batch());
  EXPECT_TRUE(Answer(request)->memory(0).gpu().fits());
}

TEST(RecommendationTest, ALossInChunksThatSavesNothingIsNotRecommended) {
  v1::PlanRequest request = Request("llama-8b", 64, 4096);
  request.set_checkpointing(v1::ACTIVATION_CHECKPOINTING_NONE);
  request.mutable_model()->mutable_architecture()->CopyFrom(SmallVocabulary());
  request.clear_model_name();
  const v1::PlanResponse answer = *Answer(request);
  ASSERT_FALSE(answer.memory(0).gpu().fits());
  EXPECT_EQ(answer.recommendation().loss(), v1::LOSS_WHOLE);
  EXPECT_THAT(answer.recommendation().sentences(), Not(Contains(HasSubstr("--loss"))));
}

TEST(RecommendationTest, AMachineThatComesAloneIsNeverRecommendedTwice) {
  v1::PlanRequest request = Request("llama-8b", 1, 4096);
  request.set_machine_name("laptop");
  const v1::Recommendation laptop = Answer(request)->recommendation();
  EXPECT_EQ(laptop.ranks(), 1u);
  EXPECT_THAT(laptop.sentences(), ElementsAre(HasSubstr("laptop comes alone")));
  request.clear_machine_name();
  request.mutable_machine()->set_like("h100-pcie");
  request.mutable_machine()->mutable_gpu()->set_memory_bytes(16e9);
  EXPECT_GT(Answer(request)->recommendation().ranks(), 1u);
  request.mutable_machine()->mutable_network()->set_most_ranks(1);
  const v1::Recommendation workstation = Answer(request)->recommendation();
  EXPECT_EQ(workstation.ranks(), 1u);
  EXPECT_THAT(workstation.sentences(), Not(Contains(HasSubstr("--ranks"))));
  EXPECT_EQ(workstation.weights(), v1::Recommendation::WEIGHTS_STREAMED);
  request.mutable_machine()->mutable_network()->set_most_ranks(1u << 17);
  request.set_ranks(2);
  EXPECT_THAT(Refusal(request), HasSubstr("network.most_ranks of machine 'h100-pcie' is 131072"));
}

TEST(RecommendationTest, AMachineWithoutANetworkComesAlone) {
  v1::PlanRequest request = Request("llama-8b", 1, 4096);
  request.clear_machine_name();
  v1::MachineDescription& machine = *request.mutable_machine();
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(
      "name: 'mine' gpu { peak_flops: 1e14 matmul_efficiency: 0.5 memory_bytes: 4e10 memory_bandwidth: 1e12 "
      "block_traffic: 80 attention_efficiency: 0.3 block_overhead: 5e-5 } passes { absorb: 1e-9 publish: 1e-9 "
      "publish_masters: 1e-9 } host { memory_bytes: 1e11 cores: 16 bandwidth: 1e11 core_bandwidth: 2e10 } "
      "host_to_device { bytes: 1e6 bytes_per_second: 2e10 } device_to_host { bytes: 1e6 bytes_per_second: 2e10 }",
      &machine));
  EXPECT_THAT(Answer(request)->recommendation().sentences(), ElementsAre(HasSubstr("mine comes alone")));
  machine.mutable_network()->set_node_ranks(4);
  machine.mutable_network()->set_node_bandwidth(1e11);
  machine.mutable_network()->set_bandwidth(1e10);
  machine.mutable_network()->set_collective_seconds(1e-5);
  machine.mutable_network()->set_agreement_seconds(1e-4);
  EXPECT_THAT(Answer(request)->recommendation().sentences(), Contains(HasSubstr("--ranks=2")));
}

TEST(RecommendationTest, TheFewestRanksThatFitNeedNoPowerOfTwo) {
  v1::PlanRequest request = Request("llama-70b", 1, 2048);
  request.clear_machine_name();
  request.mutable_machine()->set_like("gh200-96-480");
  request.mutable_machine()->mutable_host()->set_memory_bytes(300e9);
  EXPECT_EQ(Answer(request)->recommendation().ranks(), 5u) << "with one gradient slot";
  request.set_gradient_slots(2);
  const uint32_t ranks = Answer(request)->recommendation().ranks();
  EXPECT_EQ(ranks, 6u);
  for (const uint32_t tried : {ranks - 1, ranks}) {
    request.set_ranks(tried);
    EXPECT_EQ(Answer(request)->memory(0).host().fits(), tried == ranks) << tried;
  }
  request.set_ranks(1);
  request.mutable_machine()->mutable_network()->set_most_ranks(5);
  const v1::Recommendation few = Answer(request)->recommendation();
  EXPECT_THAT(few.sentences(), Contains(HasSubstr("No number of ranks up to 5 holds it")));
  EXPECT_EQ(few.ranks(), 1u);
}

TEST(PerformanceTest, AStepIsSimulatedAsAskedFor) {
  v1::PlanRequest request = Request("gpt2-1b");
  const v1::PlanResponse never = *Answer(request);
  ASSERT_TRUE(never.has_performance());
  EXPECT_NEAR(never.performance().tokens_per_second() * never.performance().step_seconds(), 4 * 2048, 1e-6);
  EXPECT_TRUE(never.performance_unknown().empty());
  request.set_clip_rate(1);
  request.set_speculation(v1::SPECULATION_ALWAYS);
  EXPECT_GT(Answer(request)->performance().step_seconds(), never.performance().step_seconds());
}

TEST(PerformanceTest, WhatDoesNotFitHasNoSpeedAndNoTimelineAndAPlanAllTheSame) {
  v1::PlanRequest request = Request("llama-70b");
  EXPECT_FALSE(Answer(request)->has_performance());
  EXPECT_THAT(Answer(request)->performance_unknown(), HasSubstr("does not fit"));
  request.set_timeline(v1::TIMELINE_FORMAT_SVG);
  const absl::StatusOr<v1::PlanResponse> answer = Answer(request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(answer->timeline_file().empty());
  EXPECT_THAT(answer->performance_unknown(), HasSubstr("does not fit"));
  EXPECT_FALSE(answer->recommendation().sentences().empty());
  request = Request("gpt2-1b", 1);
  request.set_accumulation(1 << 20);  // it fits, and is too long to be simulated
  request.set_timeline(v1::TIMELINE_FORMAT_SVG);
  EXPECT_TRUE(Answer(request)->timeline_file().empty());
}

TEST(PerformanceTest, TokensCostWhatTheMachinesOfAllRanksCost) {
  v1::PlanRequest request = Request("gpt2-2b");
  request.set_machine_name("laptop"), request.set_batch(1);
  const v1::PlanResponse free = *Answer(request);
  EXPECT_EQ(free.performance().price_per_million_tokens(), 0);
  EXPECT_THAT(free.report(), Not(HasSubstr("price")));
  request.set_price_per_hour(3);
  const v1::PlanResponse alone = *Answer(request);
  const auto hours = [](const v1::Performance& row) { return 1e6 / row.tokens_per_second() / 3600; };
  EXPECT_NEAR(alone.performance().price_per_million_tokens(), 3 * hours(alone.performance()), 1e-9);
  EXPECT_THAT(alone.report(), HasSubstr("price of 1M tokens"));
  request.set_ranks(4);
  const v1::PlanResponse four = *Answer(request);
  EXPECT_NEAR(four.performance().price_per_million_tokens(), 4 * 3 * hours(four.performance()), 1e-9);
  EXPECT_THAT(four.assumptions(), Contains(HasSubstr("what 4 machines cost at 3 an hour each")));
  request.set_price_per_hour(-1);
  EXPECT_THAT(Refusal(request), HasSubstr("price_per_hour is -1"));
}

TEST(PerformanceTest, ResidentsAreThoseThatTrainersComeTo) {
  const auto performance = [](v1::PlanRequest request, std::optional<uint32_t> residents) {
    request.clear_resident_buckets();
    if (residents) request.set_resident_buckets(*residents);
    return Answer(request)->performance();
  };
  const v1::PlanRequest waiting = Request("llama-8b", 1, 2048);
  const v1::Performance automatic = performance(waiting, std::nullopt);
  EXPECT_GT(automatic.resident_buckets(), 64u);
  EXPECT_LT(automatic.step_seconds(), performance(waiting, 64).step_seconds());
  EXPECT_EQ(performance(waiting, 0).resident_buckets(), 0u);
  EXPECT_EQ(performance(Request("llama-8b", 16, 2048), std::nullopt).resident_buckets(), 0u) << "nothing is waited for";
  v1::PlanRequest small = waiting;
  small.set_machine_name("h100-pcie");
  EXPECT_LT(performance(small, std::nullopt).resident_buckets(), automatic.resident_buckets());
  EXPECT_GT(performance(small, std::nullopt).resident_buckets(), 0u);
  v1::PlanRequest codes = waiting;
  codes.set_algorithm("test_momentum_8bit");
  EXPECT_EQ(performance(codes, std::nullopt).resident_buckets(), 0u) << "a GPU has no kernel for it";
  codes.set_algorithm("adamw_8bit");
  EXPECT_GT(performance(codes, std::nullopt).resident_buckets(), automatic.resident_buckets()) << "they take less";
  v1::PlanRequest shared = Request("gpt2-1b", 1, 2048);
  shared.set_machine_name("dgx-spark");
  EXPECT_EQ(performance(shared, std::nullopt).resident_buckets(), 0u) << "its memory is the host's";
}

TEST(PerformanceTest, MoreResidentBucketsThanThereAreAreAll) {
  v1::PlanRequest request = Request("gpt2-1b");
  request.set_resident_buckets(1u << 30);
  EXPECT_TRUE(Answer(request)->has_performance());
}

TEST(PerformanceTest, ALogOfResidentBucketsTakesHostMemoryAndShortensTheStep) {
  v1::PlanRequest request = Request("llama-8b");
  request.set_machine_name("gh200-96-480");
  request.set_resident_buckets(64);
  request.set_resident_steps(1);
  const v1::PlanResponse without = *Answer(request);
  request.clear_resident_steps();  // 4
  const v1::PlanResponse with = *Answer(request);
  EXPECT_LT(with.performance().step_seconds(), without.performance().step_seconds());
  const auto logs = [](const v1::PlanResponse& response) { return HostItem(response, "gradient logs").bytes(); };
  EXPECT_EQ(logs(without), 0u);
  EXPECT_GT(logs(with), uint64_t{3} * 40 * (64 << 20)) << "three slots more, of buckets that taper";
  EXPECT_LT(logs(with), uint64_t{3} * 64 * (64 << 20));
  request.set_resident_steps(32);
  EXPECT_THAT(Refusal(request), HasSubstr("resident_steps is 32 but must be 0 to 31"));
  request.set_resident_steps(4);
  request.set_algorithm("test_momentum_8bit");
  EXPECT_THAT(Refusal(request), HasSubstr("resident_buckets is 64 but test_momentum_8bit has no kernel for the GPU"));
}

TEST(PerformanceTest, OtherAlgorithmsAreSimulated) {
  v1::PlanRequest request = Request("gpt2-1b");
  const double first = Answer(request)->performance().step_seconds();
  request.set_algorithm("lion");
  const absl::StatusOr<v1::PlanResponse> answer = Answer(request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_LT(answer->performance().step_seconds(), first) << "its state has fewer bytes";
  EXPECT_THAT(answer->assumptions(), ::testing::Contains(HasSubstr("upper bound")));
  request.set_algorithm("lion_8bit");
  EXPECT_THAT(Answer(request)->assumptions(),
              ::testing::Contains(HasSubstr("last 4.9 times as long to absorb, and 2.4 times")));
}

TEST(AnswerTest, StateIsCountedInItsDtypesAndPerBlock) {
  v1::PlanRequest request = Request("gpt2-1b");
  request.set_algorithm("test_momentum_8bit");
  const v1::PlanResponse response = *Answer(request);
  std::map<std::string, uint64_t> bytes;
  for (const v1::MemoryItem& item : response.memory(0).host().items()) bytes[item.purpose()] = item.bytes();
  const uint64_t elements = bytes["master weights"] / 4;
  EXPECT_GT(elements, 900'000'000u);
  EXPECT_EQ(bytes["state momentum_buffer"], elements);
  EXPECT_EQ(bytes["state momentum_buffer_scale"], elements / 256 * 4);
}

TEST(AnswerTest, NormsAndEmbeddingsAreInFp32WhereOthersAreInEightBits) {
  v1::PlanRequest request = Request("llama-8b");
  request.set_algorithm("adamw_8bit");
  const v1::PlanResponse response = *Answer(request);
  std::map<std::string, uint64_t> bytes;
  for (const v1::MemoryItem& item : response.memory(0).host().items()) bytes[item.purpose()] = item.bytes();
  constexpr uint64_t kEmbedding = uint64_t{128256} * 4096, kNorms = (2 * 32 + 1) * 4096;
  EXPECT_EQ(bytes["master weights of parameters with fp32 moments"], 4 * (kEmbedding + kNorms));
  EXPECT_EQ(bytes["state exp_avg_sq of parameters with fp32 moments"], 4 * (kEmbedding + kNorms));
  EXPECT_EQ(bytes["state exp_avg"], bytes["master weights"] / 4);
  EXPECT_EQ(bytes["state exp_avg_sq_scale"], bytes["master weights"] / 256);
}

TEST(RecommendationTest, NarrowerMomentsThatFitAreSaid) {
  const auto said = [](const v1::PlanRequest& request) {
    const v1::Recommendation recommendation = Answer(request)->recommendation();
    return absl::StrJoin(recommendation.sentences(), "\n");
  };
  v1::PlanRequest request = Request("qwen3-30b-a3b");
  EXPECT_THAT(said(request), HasSubstr("With moments in 8 bits (--algorithm=adamw_8bit) it takes 343.9 GiB"));
  EXPECT_EQ(Answer(request)->recommendation().ranks(), 2u) << "what changes results is not recommended";
  request.set_algorithm("adamw_8bit");
  EXPECT_THAT(said(request), Not(HasSubstr("moments in")));
  EXPECT_THAT(
      said(Request("seed-oss-36b")),
      HasSubstr("With moments in 8 bits and masters in 16 bits (--algorithm=adamw_8bit_bf16_masters) it takes"));
  EXPECT_THAT(said(Request("llama-70b")), Not(HasSubstr("moments in"))) << "none fits";
}

TEST(RecommendationTest, WhatNarrowerMomentsGainIsSaid) {
  v1::PlanRequest request = Request("llama-8b", 1);
  request.set_quick(false);
  request.set_batch(4);  // of 2 k tokens: then codes take longer than they save
  const v1::PlanResponse on_grace = *Answer(request);
  EXPECT_THAT(
      on_grace.recommendation().sentences(1),
      AllOf(HasSubstr("A step would take "),
            HasSubstr(" s with moments in 16 bits (--algorithm=adamw_bf16) instead of "), Not(HasSubstr("8bit"))));
  request.set_batch(1);
  request.set_machine_name("h100-pcie");
  request.set_algorithm("adamw_8bit");
  const double of_moments = Answer(request)->performance().step_seconds();
  request.set_algorithm("adamw_8bit_bf16_masters");
  const double of_both = Answer(request)->performance().step_seconds();
  request.clear_algorithm();
  const v1::PlanResponse response = *Answer(request);
  EXPECT_THAT(
      response.recommendation().sentences(1),
      HasSubstr(absl::StrFormat("%.3f s with moments in 8 bits (--algorithm=adamw_8bit), %.3f s with moments in 8 "
                                "bits and masters in 16 bits (--algorithm=adamw_8bit_bf16_masters) instead of "
                                "%.3f s.",
                                of_moments, of_both, response.performance().step_seconds())));
}

TEST(TuningTest, TheRecommendedBucketsShortenTheStep) {
  v1::PlanRequest request = Request("gpt2-2b");
  request.set_clip_rate(1);
  request.set_quick(false);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  request.set_quick(true);
  const double before = Answer(request)->performance().step_seconds();
  request.set_bucket_bytes(recommendation.bucket_bytes());
  request.set_resident_buckets(recommendation.resident_buckets());
  const double after = Answer(request)->performance().step_seconds();
  EXPECT_LE(after, before);
  EXPECT_EQ(after < before, recommendation.sentences(recommendation.sentences_size() - 1).starts_with("With "));
}

TEST(AnswerTest, WhatIsMissingIsCalledMissing) {
  v1::PlanRequest request = Request("llama-8b");
  request.clear_batch();
  EXPECT_THAT(Refusal(request), HasSubstr("batch is missing"));
  request.set_batch(0);
  EXPECT_THAT(Refusal(request), HasSubstr("batch is 0 but must be 1"));
  request.clear_machine_name();
  request.clear_sequence();
  EXPECT_THAT(Refusal(request), HasSubstr("machine, sequence are missing"));
}

TEST(AnswerTest, AReserveOfZeroIsNone) {
  const auto reserve = [](const v1::PlanRequest& request) {
    const v1::PlanResponse response = *Answer(request);
    for (const v1::MemoryItem& item : response.memory(0).gpu().items()) {
      if (item.purpose() == "reserve") return item.bytes();
    }
    return uint64_t{1};
  };
  v1::PlanRequest request = Request("llama-8b");
  EXPECT_EQ(reserve(request), 5'100'273'664u);
  request.set_allocator_reserve(0);
  EXPECT_EQ(reserve(request), 0u);
  EXPECT_THAT(Answer(request)->assumptions(), Contains(HasSubstr("0 % of HBM stays free")));
}

TEST(AnswerTest, AssumptionsEndTheReportOnRequest) {
  v1::PlanRequest request = Request("llama-8b");
  const v1::PlanResponse brief = *Answer(request);
  EXPECT_THAT(brief.assumptions(), Not(IsEmpty()));
  EXPECT_THAT(brief.report(), Not(HasSubstr("host.bandwidth")));
  EXPECT_THAT(brief.report(), ::testing::EndsWith("\n--assumptions says what this rests on.\n"));
  request.set_assumptions(true);
  const v1::PlanResponse full = *Answer(request);
  const size_t begin = full.report().find("\nwhat this rests on\n");
  ASSERT_NE(begin, std::string::npos);
  EXPECT_GT(begin, full.report().find("\nrecommendation\n"));
  for (const std::string& sentence : full.assumptions()) EXPECT_GT(full.report().find(sentence), begin) << sentence;
}

TEST(AnswerTest, RefusalsNameTheFieldAndTheRange) {
  EXPECT_THAT(Refusal({}), HasSubstr("model, machine, batch, sequence are missing"));
  EXPECT_THAT(Refusal(Request("llama-8b", 0)), HasSubstr("batch is 0 but must be 1"));
  EXPECT_THAT(Refusal(Request("llama-9b")), HasSubstr("no model \"llama-9b\""));
  v1::PlanRequest request = Request("llama-8b");
  request.set_machine_name("cray-1");
  EXPECT_THAT(Refusal(request), HasSubstr("cray-1"));
  request = Request("llama-8b");
  request.mutable_model();
  EXPECT_THAT(Refusal(request), HasSubstr("either"));
  request = Request("gpt2-1b", 1, 4096);
  EXPECT_THAT(Refusal(request), HasSubstr("2048"));
  request = Request("llama-8b");
  request.set_clip_rate(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(Refusal(request), HasSubstr("clip_rate"));
  request = Request("llama-8b");
  request.set_algorithm("sgd");
  EXPECT_THAT(Refusal(request), HasSubstr("sgd"));
  request = Request("llama-8b");
  request.set_bucket_bytes(1);
  EXPECT_THAT(Refusal(request), HasSubstr("bucket_bytes is 1"));
  request = Request("llama-8b");
  request.set_worker_threads(72);
  EXPECT_THAT(Refusal(request), Not(HasSubstr("core")));  // all of them; the trainer has the rest, none
  request.set_worker_threads(73);
  EXPECT_THAT(Refusal(request), HasSubstr("73"));
}

TEST(AnswerTest, ADescribedModelIsPlannedByItsParameters) {
  v1::PlanRequest request = Request("");
  v1::Architecture& a = *request.mutable_model()->mutable_architecture();
  a.set_layers(2), a.set_hidden(64), a.set_query_heads(4), a.set_feed_forward(256), a.set_vocabulary(100);
  const absl::StatusOr<v1::PlanResponse> made = Answer(request);
  ASSERT_TRUE(made.ok()) << made.status();
  v1::Parameter& parameter = *request.mutable_model()->add_parameters();
  parameter.set_name("w"), parameter.add_shape(8), parameter.add_shape(8), parameter.set_unit(1);
  parameter.set_dtype(v1::DATA_TYPE_BFLOAT16);
  const absl::StatusOr<v1::PlanResponse> listed = Answer(request);
  ASSERT_TRUE(listed.ok()) << listed.status();
  EXPECT_EQ(listed->parameters(), 64u);
  request.mutable_model()->mutable_parameters(0)->set_unit(4);
  EXPECT_THAT(Refusal(request), HasSubstr("unit 4"));
}

}  // namespace
}  // namespace superoffload::plan
