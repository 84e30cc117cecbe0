#include "client/ctl/llama_relatives.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace superoffload::ctl {
namespace {

void AddLatentAttention(const v1::Architecture& a, const Relative& is, ListedParameters& to) {
  const uint64_t queries = uint64_t{a.query_heads()} * a.head_dimension();
  const uint64_t values = uint64_t{a.query_heads()} * a.value_head_dimension();
  if (a.query_latent() == 0) {
    to.Linear("self_attn.q_proj", queries, a.hidden(), false);
  } else {
    to.Linear("self_attn.q_a_proj", a.query_latent(), a.hidden(), is.query_key_value_biases);
    to.Add("self_attn.q_a_layernorm.weight", {a.query_latent()});
    to.Linear("self_attn.q_b_proj", queries, a.query_latent(), false);
  }
  to.Linear("self_attn.kv_a_proj_with_mqa", a.key_value_latent() + is.rotary_dimension, a.hidden(),
            is.query_key_value_biases);
  to.Add("self_attn.kv_a_layernorm.weight", {a.key_value_latent()});
  const uint64_t keys_and_values = queries - a.query_heads() * is.rotary_dimension + values;
  to.Linear("self_attn.kv_b_proj", keys_and_values, a.key_value_latent(), false);
  to.Linear("self_attn.o_proj", a.hidden(), values, is.output_bias);
}

void AddAttention(const v1::Architecture& a, const Relative& is, ListedParameters& to) {
  if (a.key_value_latent() > 0) return AddLatentAttention(a, is, to);
  const uint64_t queries = uint64_t{a.query_heads()} * a.head_dimension();
  const uint64_t keys = uint64_t{a.key_value_heads()} * a.head_dimension();
  if (is.sinks) to.Add("self_attn.sinks", {a.query_heads()});
  if (is.fused) {
    to.Linear("self_attn.o_proj", a.hidden(), queries, is.output_bias);
    to.Linear("self_attn.qkv_proj", queries + 2 * keys, a.hidden(), is.query_key_value_biases);
  } else {
    to.Linear("self_attn.q_proj", queries, a.hidden(), is.query_key_value_biases);
    to.Linear("self_attn.k_proj", keys, a.hidden(), is.query_key_value_biases);
    to.Linear("self_attn.v_proj", keys, a.hidden(), is.query_key_value_biases);
    to.Linear("self_attn.o_proj", a.hidden(), queries, is.output_bias);
  }
  if (is.query_key_norms) {
    to.Add("self_attn.q_norm.weight", {a.head_dimension()});
    to.Add("self_attn.k_norm.weight", {a.head_dimension()});
  }
}

void AddFeedForward(const std::string& at, uint64_t hidden, uint64_t inner, const Relative& is, ListedParameters& to) {
  if (is.fused) {
    to.Linear(at + "gate_up_proj", 2 * inner, hidden, is.feed_forward_biases);
  } else {
    to.Linear(at + "gate_proj", inner, hidden, is.feed_forward_biases);
    to.Linear(at + "up_proj", inner, hidden, is.feed_forward_biases);
  }
  to.Linear(at + "down_proj", hidden, inner, is.feed_forward_biases);
}

void AddExperts(const v1::Architecture& a, const Relative& is, ListedParameters& to) {
  const uint64_t experts = a.experts(), inner = a.feed_forward(), hidden = a.hidden();
  if (is.routing == Routing::kGptOss) {
    to.Linear("mlp.router", experts, hidden, true);
    to.Add("mlp.experts.gate_up_proj", {experts, hidden, 2 * inner});
    to.Add("mlp.experts.gate_up_proj_bias", {experts, 2 * inner});
    to.Add("mlp.experts.down_proj", {experts, inner, hidden});
    to.Add("mlp.experts.down_proj_bias", {experts, hidden});
    return;
  }
  to.Add("mlp.experts.gate_up_proj", {experts, 2 * inner, hidden});
  to.Add("mlp.experts.down_proj", {experts, hidden, inner});
  if (is.routing == Routing::kQwen) return to.Add("mlp.gate.weight", {experts, hidden});
  to.Add("mlp.gate.weight", {experts, hidden}, v1::DATA_TYPE_FLOAT32);
  AddFeedForward("mlp.shared_experts.", hidden, a.shared_experts() * inner, is, to);
}

}  // namespace

void AddRelative(const v1::Architecture& a, const Relative& is, ListedParameters& to) {
  to.Begin(0, "model.");
  to.Add("embed_tokens.weight", {a.vocabulary(), a.hidden()});
  for (uint64_t layer = 0; layer < a.layers(); ++layer) {
    to.Begin(layer + 1, absl::StrCat("model.layers.", layer, "."));
    AddAttention(a, is, to);
    if (is.routing == Routing::kNone || is.dense_layers.contains(layer)) {
      AddFeedForward("mlp.", a.hidden(), is.dense_feed_forward, is, to);
    } else {
      AddExperts(a, is, to);
    }
    to.Add("input_layernorm.weight", {a.hidden()});
    to.Add("post_attention_layernorm.weight", {a.hidden()});
  }
  to.Begin(a.layers() + 1, "");
  to.Add("model.norm.weight", {a.hidden()});
  if (!a.tied_embeddings()) to.Add("lm_head.weight", {a.vocabulary(), a.hidden()});
}

}  // namespace superoffload::ctl
