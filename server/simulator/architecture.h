// A decoder-only transformer in numbers: what its parameters are, which of them a token uses, and what is computed with
// them. Named as in Architecture of plan.proto.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_ARCHITECTURE_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_ARCHITECTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/spec.h"

namespace superoffload::simulator {

struct Architecture {
  uint64_t layers = 0;
  uint64_t hidden = 0;
  uint64_t query_heads = 0;
  uint64_t key_value_heads = 0;
  uint64_t head_dimension = 0;        // of queries and keys
  uint64_t value_head_dimension = 0;  // 0: head_dimension
  uint64_t query_latent = 0;          // 0: queries are made of the hidden state
  uint64_t key_value_latent = 0;
  uint64_t feed_forward = 0;
  uint64_t vocabulary = 0;
  uint64_t experts = 0;  // 0: dense
  uint64_t experts_per_token = 0;
  uint64_t shared_experts = 0;
  uint64_t window = 0;  // tokens; of `windowed_layers`
  uint64_t windowed_layers = 0;
  uint64_t learned_positions = 0;  // 0: rotary
  bool gated_feed_forward = false;
  bool tied_embeddings = false;
  bool biases = false;
  bool attention_biases = false;
  bool output_bias = false;
  bool query_key_norms = false;
  bool fused_projections = false;
  bool expert_biases = false;
  bool attention_sinks = false;

  uint64_t query_width() const { return query_heads * head_dimension; }
  uint64_t key_width() const { return key_value_heads * head_dimension; }
  uint64_t value_width() const { return key_value_heads * value_dimension(); }
  uint64_t attention_output_width() const { return query_heads * value_dimension(); }
  uint64_t value_dimension() const { return value_head_dimension > 0 ? value_head_dimension : head_dimension; }
  uint64_t head_unit() const { return layers + 1; }
};

struct Model {
  std::string name;
  Architecture architecture;
  // In the order of registration. Unit 0: before the first block; 1 to `layers`: the blocks; head_unit(): behind them.
  std::vector<engine::ParameterSpec> parameters;
};

// INVALID_ARGUMENT naming the number that is wrong; fills in those with a default (key_value_heads, head_dimension).
absl::Status Complete(Architecture& architecture);

// INVALID_ARGUMENT: MakeParameters knows no such model, and its parameters must be listed.
absl::Status CheckCanBeMade(const Architecture& architecture);

// Those of the model, with the names and shapes that transformers' classes give them. `architecture` is complete and
// can be made.
std::vector<engine::ParameterSpec> MakeParameters(const Architecture& architecture, kernels::DType dtype,
                                                  kernels::DType gradient_dtype);

// Of the parameter's elements, how many take part in the matrix products of one token: all of a matrix, of experts'
// the share that is routed to, none of norms, biases and of embeddings, which are looked up. A tied embedding is the
// head's matrix as well.
double MatrixElementsPerToken(const Model& model, const engine::ParameterSpec& parameter);

// Floating-point operations of one token's forward pass. Of the matrix products, by unit; and of the attention of one
// block over a sequence, averaged over its tokens and, where windows differ, over the blocks; causal, so half of a
// square.
std::vector<double> MatrixFlopsPerToken(const Model& model);
double AttentionFlopsPerToken(const Architecture& architecture, uint64_t sequence);

// Of one token that looks at one other, in one block: its score, and its share of the other's value.
double ScoreFlopsPerPair(const Architecture& architecture);

uint64_t ParameterCount(const Model& model);
uint64_t ActiveParameterCount(const Model& model);  // see MatrixElementsPerToken

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_ARCHITECTURE_H_
