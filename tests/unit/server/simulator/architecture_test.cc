#include "server/simulator/architecture.h"

#include <gmock/gmock.h>

#include <numeric>

#include "server/simulator/catalogue.h"

namespace superoffload::simulator {
namespace {

using ::testing::HasSubstr;

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

TEST(ArchitectureTest, ADenseModelMultipliesWithAllButEmbeddingsNormsAndBiases) {
  const Model model = *FindModel("llama-8b");
  const Architecture& a = model.architecture;
  const uint64_t looked_up = a.vocabulary * a.hidden, norms = (2 * a.layers + 1) * a.hidden;
  EXPECT_EQ(ActiveParameterCount(model), ParameterCount(model) - looked_up - norms);
  EXPECT_DOUBLE_EQ(Sum(MatrixFlopsPerToken(model)), 2.0 * static_cast<double>(ActiveParameterCount(model)));
}

TEST(ArchitectureTest, ATokenUsesTheExpertsThatItIsRoutedTo) {
  // Published: 3.3 B of Qwen3-30B-A3B and 3.6 B of GPT-OSS-20B are active, the embedding included.
  for (const auto& [name, billions] : {std::pair{"qwen3-30b-a3b", 3.3}, {"gpt-oss-20b", 3.6}}) {
    const Model model = *FindModel(name);
    const uint64_t embedding = model.architecture.vocabulary * model.architecture.hidden;
    const double active = static_cast<double>(ActiveParameterCount(model)) / 1e9;
    EXPECT_GT(active, billions - static_cast<double>(embedding) / 1e9 - 0.1) << name;
    EXPECT_LT(active, billions + 0.1) << name;
  }
}

TEST(ArchitectureTest, ATiedEmbeddingIsTheHeadsMatrix) {
  const Model model = *FindModel("gpt2-1b");
  const Architecture& a = model.architecture;
  EXPECT_DOUBLE_EQ(MatrixFlopsPerToken(model).back(), 2.0 * static_cast<double>(a.vocabulary * a.hidden));
  EXPECT_EQ(MatrixFlopsPerToken(model).front(), 0);
}

TEST(ArchitectureTest, CausalAttentionLooksAtHalfAndAWindowAtItself) {
  Architecture a{.layers = 2, .hidden = 8, .query_heads = 2, .feed_forward = 8, .vocabulary = 8};
  ASSERT_TRUE(Complete(a).ok());
  EXPECT_DOUBLE_EQ(AttentionFlopsPerToken(a, 1), 4 * 8 * 1);
  EXPECT_DOUBLE_EQ(AttentionFlopsPerToken(a, 3), 4 * 8 * 2);  // 1, 2 and 3 tokens
  a.window = 2;
  a.windowed_layers = 2;
  EXPECT_DOUBLE_EQ(AttentionFlopsPerToken(a, 4), 4 * 8 * (1 + 2 + 2 + 2) / 4.0);
  a.windowed_layers = 1;
  EXPECT_DOUBLE_EQ(AttentionFlopsPerToken(a, 4), 4 * 8 * (7 / 4.0 + 10 / 4.0) / 2);
}

TEST(ArchitectureTest, ValuesMayBeNarrowerThanQueriesAndKeys) {
  Architecture a{.layers = 2, .hidden = 8, .query_heads = 2, .head_dimension = 6, .feed_forward = 8, .vocabulary = 8};
  a.value_head_dimension = 4;
  ASSERT_TRUE(Complete(a).ok());
  EXPECT_DOUBLE_EQ(AttentionFlopsPerToken(a, 3), 2 * (2 * 6 + 2 * 4) * 2);
  const std::vector<engine::ParameterSpec> parameters =
      MakeParameters(a, kernels::DType::kBFloat16, kernels::DType::kBFloat16);
  EXPECT_EQ(parameters[1].shape, (std::vector<uint64_t>{12, 8}));  // q_proj
  EXPECT_EQ(parameters[3].shape, (std::vector<uint64_t>{8, 8}));   // v_proj
  EXPECT_EQ(parameters[4].shape, (std::vector<uint64_t>{8, 8}));   // o_proj
}

TEST(ArchitectureTest, WhatIsNotMadeIsSaidByName) {
  Architecture a{.layers = 2, .hidden = 8, .query_heads = 2, .feed_forward = 8, .vocabulary = 8};
  EXPECT_TRUE(CheckCanBeMade(a).ok());
  a.shared_experts = 1;
  EXPECT_THAT(std::string(CheckCanBeMade(a).message()), HasSubstr("architecture.shared_experts is 1"));
  a.key_value_latent = 4;
  EXPECT_THAT(std::string(CheckCanBeMade(a).message()), HasSubstr("architecture.key_value_latent is 4"));
}

TEST(ArchitectureTest, MissingNumbersAreNamed) {
  Architecture a{.layers = 2, .hidden = 8, .query_heads = 2, .feed_forward = 8};
  EXPECT_THAT(std::string(Complete(a).message()), HasSubstr("architecture.vocabulary is 0"));
  a.vocabulary = 8;
  a.experts = 4;
  EXPECT_THAT(std::string(Complete(a).message()), HasSubstr("experts_per_token is 0 but must be 1 to 4"));
  a.experts_per_token = 2;
  a.windowed_layers = 1;
  EXPECT_THAT(std::string(Complete(a).message()), HasSubstr("windowed_layers"));
  a.windowed_layers = 0;
  EXPECT_TRUE(Complete(a).ok());
  EXPECT_EQ(a.head_dimension, 4u);
}

// Its parameters would fill the memory before anybody could refuse them.
TEST(ArchitectureTest, LayersAreNoMoreThanCanBeListed) {
  Architecture a{.layers = 1 << 20, .hidden = 8, .query_heads = 1, .feed_forward = 8, .vocabulary = 8};
  EXPECT_THAT(std::string(Complete(a).message()), HasSubstr("layers is 1048576 but must be 1 to 16384"));
  a.layers = 1 << 14;
  EXPECT_TRUE(Complete(a).ok());
}

}  // namespace
}  // namespace superoffload::simulator
