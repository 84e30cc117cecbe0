#include "client/ctl/model_families.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/ctl/listed_parameters.h"
#include "client/ctl/llama_relatives.h"

namespace superoffload::ctl {
namespace {

// The numbers that each family states by the same names.
void ReadSizes(ConfigFields& config, bool tied, v1::Architecture& a) {
  a.set_layers(static_cast<uint32_t>(config.Stated({"num_hidden_layers"}, kMostConfigLayers)));
  a.set_hidden(static_cast<uint32_t>(config.Stated({"hidden_size"})));
  a.set_query_heads(static_cast<uint32_t>(config.Stated({"num_attention_heads"})));
  a.set_vocabulary(static_cast<uint32_t>(config.Stated({"vocab_size"})));
  a.set_tied_embeddings(config.FlagOr("tie_word_embeddings", tied));
}

uint64_t HiddenPerHead(ConfigFields& config, const v1::Architecture& a) {
  if (a.hidden() % a.query_heads() == 0) return a.hidden() / a.query_heads();
  config.Fail(absl::StrCat("the hidden size is ", a.hidden(), " but must be a multiple of the number of heads, ",
                           a.query_heads()));
  return 1;
}

void SetKeyValueHeads(ConfigFields& config, uint64_t heads, v1::Architecture& a) {
  a.set_key_value_heads(static_cast<uint32_t>(heads));
  if (a.query_heads() % heads == 0) return;
  config.Fail(absl::StrCat("there are ", a.query_heads(), " query heads, but they must be a multiple of the ", heads,
                           " heads of keys and values"));
}

void SetWindow(uint64_t window, uint64_t layers, v1::Architecture& a) {
  if (window == 0 || layers == 0) return;
  a.set_window(static_cast<uint32_t>(window));
  a.set_windowed_layers(static_cast<uint32_t>(layers));
}

// sliding_window of a family whose default it is; a null is none.
uint64_t WindowOr(ConfigFields& config, uint64_t otherwise) {
  return config.States("sliding_window") ? config.NumberOr("sliding_window", 0) : otherwise;
}

// Windows of layer_types; where there are none, `is_windowed` says which layer has one.
template <typename IsWindowed>
void SetWindowByLayer(ConfigFields& config, uint64_t window, const IsWindowed& is_windowed, v1::Architecture& a) {
  uint64_t layers = 0;
  if (const auto kinds = config.Texts("layer_types"); kinds.has_value()) {
    if (kinds->size() != a.layers()) {
      config.Fail(absl::StrCat("layer_types has ", kinds->size(), " entries for ", a.layers(), " layers"));
    }
    layers = static_cast<uint64_t>(std::count(kinds->begin(), kinds->end(), "sliding_attention"));
  } else {
    for (uint64_t layer = 0; layer < a.layers(); ++layer) layers += is_windowed(layer);
  }
  SetWindow(window, layers, a);
}

// ---- Llama and its relatives

// The sizes of a relative without experts. `head_dimension`: the family's where the configuration has none; 0: the
// hidden state's share.
void ReadDense(ConfigFields& config, uint64_t head_dimension, v1::Architecture& a, Relative& is) {
  ReadSizes(config, false, a);
  a.set_gated_feed_forward(true);
  a.set_feed_forward(static_cast<uint32_t>(config.Stated({"intermediate_size"})));
  is.dense_feed_forward = a.feed_forward();
  const uint64_t heads = config.NumberOr("head_dim", config.States("head_dim") ? 0 : head_dimension);
  a.set_head_dimension(static_cast<uint32_t>(heads > 0 ? heads : HiddenPerHead(config, a)));
}

// Of a family whose default is another model's, it must be stated; a null says that all heads have their own.
void ReadKeyValueHeads(ConfigFields& config, bool optional, v1::Architecture& a) {
  const bool as_queries = !config.Has("num_key_value_heads") && (optional || config.States("num_key_value_heads"));
  SetKeyValueHeads(config, as_queries ? a.query_heads() : config.Stated({"num_key_value_heads"}), a);
}

void Llama(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is;
  ReadDense(config, 0, a, is);
  (void)HiddenPerHead(config, a);
  ReadKeyValueHeads(config, true, a);
  is.query_key_value_biases = is.output_bias = config.FlagOr("attention_bias", false);
  is.feed_forward_biases = config.FlagOr("mlp_bias", false);
  AddRelative(a, is, to);
}

void Mistral(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is;
  ReadDense(config, 0, a, is);
  ReadKeyValueHeads(config, false, a);
  SetWindow(WindowOr(config, 4096), a.layers(), a);
  AddRelative(a, is, to);
}

void Phi3(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is{.fused = true};
  ReadDense(config, 0, a, is);
  ReadKeyValueHeads(config, true, a);
  SetWindow(WindowOr(config, 0), a.layers(), a);
  AddRelative(a, is, to);
}

void SeedOss(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is;
  ReadDense(config, 128, a, is);
  ReadKeyValueHeads(config, false, a);
  is.query_key_value_biases = config.FlagOr("attention_bias", true);
  is.output_bias = config.FlagOr("attention_out_bias", false);
  is.feed_forward_biases = config.FlagOr("mlp_bias", false);
  AddRelative(a, is, to);
}

void ReadQwensWindow(ConfigFields& config, v1::Architecture& a) {
  const uint64_t window = config.FlagOr("use_sliding_window", false) ? WindowOr(config, 4096) : 0;
  const uint64_t first = config.CountOr("max_window_layers", 28);
  SetWindowByLayer(config, window, [&](uint64_t layer) { return layer >= first; }, a);
}

void Qwen2(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is{.query_key_value_biases = true};
  ReadDense(config, 0, a, is);
  ReadKeyValueHeads(config, false, a);
  ReadQwensWindow(config, a);
  AddRelative(a, is, to);
}

void Qwen3(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is{.query_key_norms = true};
  ReadDense(config, 128, a, is);
  ReadKeyValueHeads(config, false, a);
  is.query_key_value_biases = is.output_bias = config.FlagOr("attention_bias", false);
  ReadQwensWindow(config, a);
  AddRelative(a, is, to);
}

void ReadRouting(ConfigFields& config, std::initializer_list<std::string> experts, v1::Architecture& a) {
  a.set_experts(static_cast<uint32_t>(config.Stated(experts)));
  a.set_experts_per_token(static_cast<uint32_t>(config.Stated({"num_experts_per_tok"})));
  if (a.experts_per_token() <= a.experts()) return;
  config.Fail(
      absl::StrCat("num_experts_per_tok is ", a.experts_per_token(), " but there are ", a.experts(), " experts"));
}

void Qwen3Moe(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is{.query_key_norms = true, .routing = Routing::kQwen};
  ReadSizes(config, false, a);
  a.set_gated_feed_forward(true);
  a.set_feed_forward(static_cast<uint32_t>(config.Stated({"moe_intermediate_size"})));
  const uint64_t head = config.NumberOr("head_dim", 0);
  a.set_head_dimension(static_cast<uint32_t>(head > 0 ? head : HiddenPerHead(config, a)));
  ReadKeyValueHeads(config, false, a);
  ReadRouting(config, {"num_experts", "num_local_experts"}, a);
  for (const uint64_t layer : config.Numbers("mlp_only_layers")) is.dense_layers.insert(layer);
  const uint64_t sparse_step = config.NumberOr("decoder_sparse_step", 1);
  for (uint64_t layer = 0; layer < a.layers(); ++layer) {
    if ((layer + 1) % sparse_step != 0) is.dense_layers.insert(layer);
  }
  if (!is.dense_layers.empty()) is.dense_feed_forward = config.Stated({"intermediate_size"});
  is.query_key_value_biases = is.output_bias = config.FlagOr("attention_bias", false);
  if (config.FlagOr("use_sliding_window", false)) SetWindow(WindowOr(config, 4096), a.layers(), a);
  AddRelative(a, is, to);
}

void GptOss(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is{.sinks = true, .routing = Routing::kGptOss};
  ReadDense(config, 64, a, is);
  ReadKeyValueHeads(config, false, a);
  ReadRouting(config, {"num_local_experts", "num_experts"}, a);
  is.query_key_value_biases = is.output_bias = config.FlagOr("attention_bias", true);
  SetWindowByLayer(config, WindowOr(config, 128), [](uint64_t layer) { return layer % 2 == 0; }, a);
  AddRelative(a, is, to);
}

void DeepSeekV3(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  Relative is{.routing = Routing::kDeepSeek};
  ReadSizes(config, false, a);
  a.set_gated_feed_forward(true);
  a.set_feed_forward(static_cast<uint32_t>(config.Stated({"moe_intermediate_size"})));
  ReadRouting(config, {"n_routed_experts", "num_local_experts"}, a);
  a.set_shared_experts(static_cast<uint32_t>(config.Stated({"n_shared_experts"})));
  // So many of the first layers; it may be 0.
  const uint64_t dense = config.Has("first_k_dense_replace") ? config.CountOr("first_k_dense_replace", 0)
                                                             : config.Stated({"first_k_dense_replace"});
  for (uint64_t layer = 0; layer < std::min<uint64_t>(dense, a.layers()); ++layer) is.dense_layers.insert(layer);
  is.dense_feed_forward = config.Stated({"intermediate_size"});
  a.set_key_value_heads(a.query_heads());
  is.rotary_dimension = config.Stated({"qk_rope_head_dim"});
  a.set_head_dimension(static_cast<uint32_t>(config.Stated({"qk_nope_head_dim"}) + is.rotary_dimension));
  a.set_value_head_dimension(static_cast<uint32_t>(config.Stated({"v_head_dim"})));
  a.set_key_value_latent(static_cast<uint32_t>(config.Stated({"kv_lora_rank"})));
  if (!config.States("q_lora_rank") || config.Has("q_lora_rank")) {
    a.set_query_latent(static_cast<uint32_t>(config.Stated({"q_lora_rank"})));
  }
  is.query_key_value_biases = is.output_bias = config.FlagOr("attention_bias", false);
  AddRelative(a, is, to);
}

// ---- GPT-2 and Falcon

void Gpt2(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  a.set_layers(static_cast<uint32_t>(config.Stated({"n_layer", "num_hidden_layers"}, kMostConfigLayers)));
  a.set_hidden(static_cast<uint32_t>(config.Stated({"n_embd", "hidden_size"})));
  a.set_query_heads(static_cast<uint32_t>(config.Stated({"n_head", "num_attention_heads"})));
  a.set_vocabulary(static_cast<uint32_t>(config.Stated({"vocab_size"})));
  a.set_learned_positions(static_cast<uint32_t>(config.Stated({"n_positions", "max_position_embeddings"})));
  a.set_tied_embeddings(config.FlagOr("tie_word_embeddings", true));
  a.set_key_value_heads(a.query_heads());
  a.set_head_dimension(static_cast<uint32_t>(HiddenPerHead(config, a)));
  const uint64_t hidden = a.hidden(), inner = config.NumberOr("n_inner", 4 * hidden);
  a.set_feed_forward(static_cast<uint32_t>(inner));
  if (config.FlagOr("add_cross_attention", false)) config.Fail("add_cross_attention makes it part of another model");
  to.Begin(0, "transformer.");
  to.Add("wte.weight", {a.vocabulary(), hidden});
  to.Add("wpe.weight", {a.learned_positions(), hidden});
  for (uint64_t layer = 0; layer < a.layers(); ++layer) {
    to.Begin(layer + 1, absl::StrCat("transformer.h.", layer, "."));
    to.LayerNorm("ln_1", hidden);
    to.Transposed("attn.c_attn", hidden, 3 * hidden);
    to.Transposed("attn.c_proj", hidden, hidden);
    to.LayerNorm("ln_2", hidden);
    to.Transposed("mlp.c_fc", hidden, inner);
    to.Transposed("mlp.c_proj", inner, hidden);
  }
  to.Begin(a.layers() + 1, "");
  to.LayerNorm("transformer.ln_f", hidden);
  if (!a.tied_embeddings()) to.Add("lm_head.weight", {a.vocabulary(), hidden});
}

// The first architecture has one key and value for all heads (multi_query) or one for each, and does not read
// num_kv_heads; the new one does.
void Falcon(ConfigFields& config, v1::Architecture& a, ListedParameters& to) {
  ReadSizes(config, true, a);
  a.set_head_dimension(static_cast<uint32_t>(HiddenPerHead(config, a)));
  const bool is_new = config.FlagOr("new_decoder_architecture", false);
  const bool one = !is_new && config.FlagOr("multi_query", true);
  const uint64_t stated = config.NumberOr("num_kv_heads", a.query_heads());
  SetKeyValueHeads(config, one ? 1 : is_new ? stated : a.query_heads(), a);
  const uint64_t hidden = a.hidden(), inner = config.NumberOr("ffn_hidden_size", 4 * hidden);
  a.set_feed_forward(static_cast<uint32_t>(inner));
  const bool bias = config.FlagOr("bias", false), parallel = config.FlagOr("parallel_attn", true);
  const uint64_t norms = config.CountOr("num_ln_in_parallel_attn", is_new ? 2 : 1);
  const uint64_t queries_keys_values = hidden + 2 * uint64_t{a.key_value_heads()} * a.head_dimension();
  to.Begin(0, "transformer.");
  to.Add("word_embeddings.weight", {a.vocabulary(), hidden});
  for (uint64_t layer = 0; layer < a.layers(); ++layer) {
    to.Begin(layer + 1, absl::StrCat("transformer.h.", layer, "."));
    to.Linear("self_attention.query_key_value", queries_keys_values, hidden, bias);
    to.Linear("self_attention.dense", hidden, hidden, bias);
    to.Linear("mlp.dense_h_to_4h", inner, hidden, bias);
    to.Linear("mlp.dense_4h_to_h", hidden, inner, bias);
    if (!parallel) {
      to.LayerNorm("post_attention_layernorm", hidden);
      to.LayerNorm("input_layernorm", hidden);
    } else if (norms == 2) {
      to.LayerNorm("ln_attn", hidden);
      to.LayerNorm("ln_mlp", hidden);
    } else {
      to.LayerNorm("input_layernorm", hidden);
    }
  }
  to.Begin(a.layers() + 1, "");
  to.LayerNorm("transformer.ln_f", hidden);
  if (!a.tied_embeddings()) to.Add("lm_head.weight", {a.vocabulary(), hidden});
}

struct Family {
  const char* name;
  void (*describe)(ConfigFields& config, v1::Architecture& architecture, ListedParameters& to);
};

constexpr Family kFamilies[] = {
    {"deepseek_v3", DeepSeekV3}, {"falcon", Falcon}, {"gpt2", Gpt2},   {"gpt_oss", GptOss}, {"llama", Llama},
    {"mistral", Mistral},        {"phi3", Phi3},     {"qwen2", Qwen2}, {"qwen3", Qwen3},    {"qwen3_moe", Qwen3Moe},
    {"seed_oss", SeedOss}};

}  // namespace

std::vector<std::string> FamilyNames() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.name);
  return names;
}

bool DescribeFamily(const std::string& family, ConfigFields& config, v1::DataType dtype, v1::ModelDescription* model) {
  for (const Family& known : kFamilies) {
    if (known.name != family) continue;
    ListedParameters to(dtype, model);
    known.describe(config, *model->mutable_architecture(), to);
    return true;
  }
  return false;
}

}  // namespace superoffload::ctl
