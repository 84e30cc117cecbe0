#include "server/plan/answer.h"

#include <gmock/gmock.h>

#include <numeric>

#include "server/plan/memory_plan.h"
#include "server/optimizer/hosted_memory.h"

namespace superoffload::plan {
namespace {

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
  return request;
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
  const engine::Layout layout = *engine::PlanLayout(question.spec);
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
  EXPECT_EQ(response->memory(0).gpu().available_bytes(), 144'000'000'000u);
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
  EXPECT_THAT(response->recommendation().not_supported(), IsEmpty());
  ASSERT_EQ(response->performance_size(), 1);
  EXPECT_NEAR(response->performance(0).tokens_per_second() * response->performance(0).step_seconds(), 4 * 2048, 1e-6);
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
  EXPECT_GT(Answer(request)->performance(0).step_seconds(), adapters.performance(0).step_seconds());
  request.mutable_machine()->mutable_network()->set_bandwidth(-1);
  EXPECT_THAT(Refusal(request), HasSubstr("network.bandwidth of machine 'gh200-96-480' is -1"));
  request.set_ranks(1);
  EXPECT_TRUE(Answer(request).ok());
}

TEST(RecommendationTest, WhatFitsStaysAsItIs) {
  const v1::Recommendation recommendation = Answer(Request("llama-8b"))->recommendation();
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT);
  EXPECT_EQ(recommendation.ranks(), 1u);
  EXPECT_THAT(recommendation.not_supported(), IsEmpty());
}

TEST(RecommendationTest, ABudgetThatIsTooSmallByALittleIsRaised) {
  const v1::Recommendation recommendation = Answer(Request("gpt2-25b"))->recommendation();
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("memory_budget_bytes")));
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("overlap=True")));
}

TEST(RecommendationTest, AHostThatIsTooSmallNeedsRanks) {
  const v1::Recommendation recommendation = Answer(Request("llama-70b"))->recommendation();
  EXPECT_EQ(recommendation.ranks(), 4u);
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT);  // on each of them
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("--ranks=4")));
  EXPECT_THAT(recommendation.not_supported(), IsEmpty());
}

TEST(RecommendationTest, WeightsThatDoNotFitAreSharedByRanks) {
  v1::PlanRequest request = Request("seed-oss-36b", 1);
  request.clear_machine_name();
  request.mutable_machine()->set_like("h100-pcie");
  request.mutable_machine()->mutable_gpu()->set_memory_bytes(40e9);
  request.mutable_machine()->mutable_host()->set_memory_bytes(2e12);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_EQ(recommendation.weights(), v1::Recommendation::WEIGHTS_RESIDENT);
  EXPECT_EQ(recommendation.streamed_fraction(), 0);
  EXPECT_GT(recommendation.ranks(), 1u);
  EXPECT_THAT(recommendation.not_supported(), ElementsAre(HasSubstr("On one rank it needs weights that stream")));
  request.set_ranks(recommendation.ranks());
  EXPECT_TRUE(Answer(request)->memory(0).gpu().fits());
  EXPECT_EQ(Answer(request)->performance_size(), 1);
}

TEST(RecommendationTest, WhatNoNumberOfRanksHoldsIsSaid) {
  v1::PlanRequest request = Request("llama-8b", 1, 4'000'000);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  EXPECT_TRUE(recommendation.offload_activations());
  EXPECT_EQ(recommendation.ranks(), 1u);
  EXPECT_THAT(recommendation.sentences(), Contains(HasSubstr("Neither more ranks nor weights that stream")));
}

TEST(RecommendationTest, ASmallerBatchOrCheckpointsMakeRoom) {
  v1::PlanRequest request = Request("llama-8b", 64, 4096);
  const v1::PlanResponse batch = *Answer(request);
  EXPECT_FALSE(batch.memory(0).gpu().fits());
  EXPECT_THAT(batch.recommendation().sentences(),
              Contains(HasSubstr("batch of " + std::to_string(batch.largest().batch()))));
  request.set_batch(2);
  request.set_sequence(16384);
  request.set_checkpointing(v1::ACTIVATION_CHECKPOINTING_NONE);
  EXPECT_THAT(Answer(request)->recommendation().sentences(), Contains(HasSubstr("Checkpoint")));
}

TEST(PerformanceTest, AStepIsSimulatedAsAskedFor) {
  v1::PlanRequest request = Request("gpt2-1b");
  const v1::PlanResponse never = *Answer(request);
  ASSERT_EQ(never.performance_size(), 1);
  EXPECT_EQ(never.performance(0).schedule(), "superoffloadd");
  EXPECT_NEAR(never.performance(0).tokens_per_second() * never.performance(0).step_seconds(), 4 * 2048, 1e-6);
  EXPECT_TRUE(never.performance_unknown().empty());
  request.set_clip_rate(1);
  request.set_speculation(v1::SPECULATION_ALWAYS);
  EXPECT_GT(Answer(request)->performance(0).step_seconds(), never.performance(0).step_seconds());
}

TEST(PerformanceTest, PeersRunOnTheSameMachineWhereTheyFit) {
  v1::PlanRequest request = Request("gpt2-10b", 1);
  for (const char* name : {"ddp", "zero-offload", "superoffload-published"}) request.add_schedules(name);
  const v1::PlanResponse response = *Answer(request);
  ASSERT_EQ(response.performance_size(), 4);
  EXPECT_EQ(response.performance(1).unknown(), "does not fit");
  EXPECT_GT(response.performance(2).step_seconds(), response.performance(0).step_seconds());
  request.set_ranks(2);
  EXPECT_EQ(Answer(request)->performance(2).unknown(), "known of one rank only");
  request.add_schedules("zero-7");
  EXPECT_THAT(Refusal(request), HasSubstr("no schedule \"zero-7\""));
}

TEST(PerformanceTest, WhatDoesNotFitHasNoSpeedAndNoTimelineAndAPlanAllTheSame) {
  v1::PlanRequest request = Request("llama-70b");
  EXPECT_THAT(Answer(request)->performance(), IsEmpty());
  EXPECT_THAT(Answer(request)->performance_unknown(), HasSubstr("does not fit"));
  request.set_timeline(v1::TIMELINE_FORMAT_SVG);
  const absl::StatusOr<v1::PlanResponse> answer = Answer(request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(answer->timeline_file().empty());
  EXPECT_THAT(answer->performance_unknown(), HasSubstr("does not fit"));
  EXPECT_FALSE(answer->recommendation().sentences().empty());
}

TEST(PerformanceTest, MoreResidentBucketsThanThereAreAreAll) {
  v1::PlanRequest request = Request("gpt2-1b");
  request.set_resident_buckets(1u << 30);
  EXPECT_EQ(Answer(request)->performance_size(), 1);
}

TEST(PerformanceTest, OtherAlgorithmsAreSimulatedAndPeersWithThemAreNot) {
  v1::PlanRequest request = Request("gpt2-1b");
  const double first = Answer(request)->performance(0).step_seconds();
  request.set_algorithm(std::string(kernels::Algorithms().back()->name));
  request.add_schedules("ddp");
  const absl::StatusOr<v1::PlanResponse> answer = Answer(request);
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_EQ(answer->performance_size(), 2);
  EXPECT_LT(answer->performance(0).step_seconds(), first) << "its state has fewer bytes";
  EXPECT_THAT(answer->performance(1).unknown(), HasSubstr("only"));
  EXPECT_THAT(answer->assumptions(), ::testing::Contains(HasSubstr("upper bound")));
}

TEST(TuningTest, TheRecommendedBucketsShortenTheStep) {
  v1::PlanRequest request = Request("gpt2-2b");
  request.set_clip_rate(1);
  request.set_quick(false);
  const v1::Recommendation recommendation = Answer(request)->recommendation();
  request.set_quick(true);
  const double before = Answer(request)->performance(0).step_seconds();
  request.set_bucket_bytes(recommendation.bucket_bytes());
  request.set_resident_buckets(recommendation.resident_buckets());
  const double after = Answer(request)->performance(0).step_seconds();
  EXPECT_LE(after, before);
  EXPECT_EQ(after < before, recommendation.sentences(recommendation.sentences_size() - 1).starts_with("With "));
}

TEST(AnswerTest, RefusalsNameTheFieldAndTheRange) {
  EXPECT_THAT(Refusal({}), HasSubstr("batch is 0 but must be 1"));
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
