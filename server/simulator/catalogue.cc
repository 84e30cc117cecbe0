#include "server/simulator/catalogue.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace superoffload::simulator {
namespace {

struct Entry {
  const char* name;
  Architecture architecture;
};

constexpr Architecture Gpt2(uint64_t hidden, uint64_t layers) {
  return {.layers = layers,
          .hidden = hidden,
          .query_heads = 32,
          .key_value_heads = 32,
          .head_dimension = hidden / 32,
          .feed_forward = 4 * hidden,
          .vocabulary = 50257,
          .learned_positions = 2048,
          .tied_embeddings = true,
          .biases = true};
}

constexpr Entry kEntries[] = {
    {"gpt-oss-20b",
     {.layers = 24,
      .hidden = 2880,
      .query_heads = 64,
      .key_value_heads = 8,
      .head_dimension = 64,
      .feed_forward = 2880,
      .vocabulary = 201088,
      .experts = 32,
      .experts_per_token = 4,
      .window = 128,
      .windowed_layers = 12,
      .gated_feed_forward = true,
      .attention_biases = true,
      .output_bias = true,
      .expert_biases = true,
      .attention_sinks = true}},
    {"llama-70b",
     {.layers = 80,
      .hidden = 8192,
      .query_heads = 64,
      .key_value_heads = 8,
      .head_dimension = 128,
      .feed_forward = 28672,
      .vocabulary = 128256,
      .gated_feed_forward = true}},
    {"llama-8b",
     {.layers = 32,
      .hidden = 4096,
      .query_heads = 32,
      .key_value_heads = 8,
      .head_dimension = 128,
      .feed_forward = 14336,
      .vocabulary = 128256,
      .gated_feed_forward = true}},
    {"phi-4",
     {.layers = 40,
      .hidden = 5120,
      .query_heads = 40,
      .key_value_heads = 10,
      .head_dimension = 128,
      .feed_forward = 17920,
      .vocabulary = 100352,
      .gated_feed_forward = true,
      .fused_projections = true}},
    {"qwen3-14b",
     {.layers = 40,
      .hidden = 5120,
      .query_heads = 40,
      .key_value_heads = 8,
      .head_dimension = 128,
      .feed_forward = 17408,
      .vocabulary = 151936,
      .gated_feed_forward = true,
      .query_key_norms = true}},
    {"qwen3-30b-a3b",
     {.layers = 48,
      .hidden = 2048,
      .query_heads = 32,
      .key_value_heads = 4,
      .head_dimension = 128,
      .feed_forward = 768,
      .vocabulary = 151936,
      .experts = 128,
      .experts_per_token = 8,
      .gated_feed_forward = true,
      .query_key_norms = true}},
    {"seed-oss-36b",
     {.layers = 64,
      .hidden = 5120,
      .query_heads = 80,
      .key_value_heads = 8,
      .head_dimension = 128,
      .feed_forward = 27648,
      .vocabulary = 155136,
      .gated_feed_forward = true,
      .attention_biases = true}},
    {"gpt2-1b", Gpt2(2048, 20)},
    {"gpt2-2b", Gpt2(2048, 40)},
    {"gpt2-3b", Gpt2(2048, 60)},
    {"gpt2-5b", Gpt2(3072, 44)},
    {"gpt2-10b", Gpt2(4096, 50)},
    {"gpt2-15b", Gpt2(4096, 78)},
    {"gpt2-20b", Gpt2(8192, 25)},
    {"gpt2-25b", Gpt2(8192, 30)},
    {"gpt2-50b", Gpt2(8192, 60)},
    {"gpt2-80b", Gpt2(8192, 100)},
    {"gpt2-150b", Gpt2(16384, 45)},
    {"gpt2-200b", Gpt2(16384, 60)},
};

}  // namespace

absl::StatusOr<Model> FindModel(std::string_view name, kernels::DType dtype, kernels::DType gradient_dtype) {
  for (const Entry& entry : kEntries) {
    if (entry.name == name) {
      return Model{entry.name, entry.architecture, MakeParameters(entry.architecture, dtype, gradient_dtype)};
    }
  }
  return absl::NotFoundError(absl::StrCat("there is no model \"", std::string(name), "\"; give a file, or one of ",
                                          absl::StrJoin(ModelNames(), ", ")));
}

std::vector<std::string> ModelNames() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

}  // namespace superoffload::simulator
