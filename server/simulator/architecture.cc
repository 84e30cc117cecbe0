#include "server/simulator/architecture.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace superoffload::simulator {
namespace {

// Far beyond any model; products of three stay far below 2^64.
constexpr uint64_t kMost = uint64_t{1} << 20;
constexpr uint64_t kMostLayers = uint64_t{1} << 14;  // each is a dozen parameters and more, which are listed one by one

struct Bound {
  const char* name;
  uint64_t Architecture::* field;
  uint64_t least;
  uint64_t most = kMost;
};

constexpr Bound kBounds[] = {{"layers", &Architecture::layers, 1, kMostLayers},
                             {"hidden", &Architecture::hidden, 1},
                             {"query_heads", &Architecture::query_heads, 1},
                             {"key_value_heads", &Architecture::key_value_heads, 1},
                             {"head_dimension", &Architecture::head_dimension, 1},
                             {"value_head_dimension", &Architecture::value_head_dimension, 0},
                             {"query_latent", &Architecture::query_latent, 0},
                             {"key_value_latent", &Architecture::key_value_latent, 0},
                             {"feed_forward", &Architecture::feed_forward, 1},
                             {"vocabulary", &Architecture::vocabulary, 1},
                             {"experts", &Architecture::experts, 0},
                             {"experts_per_token", &Architecture::experts_per_token, 0},
                             {"shared_experts", &Architecture::shared_experts, 0},
                             {"learned_positions", &Architecture::learned_positions, 0}};

// Collects parameters under prefixes.
class Builder {
 public:
  Builder(const Architecture& architecture, kernels::DType dtype, kernels::DType gradient_dtype)
      : a_(architecture), dtype_(dtype), gradient_dtype_(gradient_dtype) {}

  std::vector<engine::ParameterSpec> Gpt2() && {
    Add("transformer.wte.weight", {a_.vocabulary, a_.hidden});
    if (a_.learned_positions > 0) Add("transformer.wpe.weight", {a_.learned_positions, a_.hidden});
    for (uint64_t layer = 0; layer < a_.layers; ++layer) {
      unit_ = static_cast<uint32_t>(layer + 1);
      const std::string block = absl::StrCat("transformer.h.", layer, ".");
      WithBias(block + "ln_1", {a_.hidden}, a_.hidden);
      const uint64_t qkv = a_.query_width() + a_.key_width() + a_.value_width();
      WithBias(block + "attn.c_attn", {a_.hidden, qkv}, qkv);
      WithBias(block + "attn.c_proj", {a_.attention_output_width(), a_.hidden}, a_.hidden);
      WithBias(block + "ln_2", {a_.hidden}, a_.hidden);
      WithBias(block + "mlp.c_fc", {a_.hidden, a_.feed_forward}, a_.feed_forward);
      WithBias(block + "mlp.c_proj", {a_.feed_forward, a_.hidden}, a_.hidden);
    }
    unit_ = static_cast<uint32_t>(a_.head_unit());
    WithBias("transformer.ln_f", {a_.hidden}, a_.hidden);
    AddHead();
    return std::move(parameters_);
  }

  std::vector<engine::ParameterSpec> Llama() && {
    Add("model.embed_tokens.weight", {a_.vocabulary, a_.hidden});
    for (uint64_t layer = 0; layer < a_.layers; ++layer) {
      unit_ = static_cast<uint32_t>(layer + 1);
      const std::string block = absl::StrCat("model.layers.", layer, ".");
      AddAttention(block + "self_attn.");
      a_.experts > 0 ? AddExperts(block + "mlp.") : AddMlp(block + "mlp.");
      Add(block + "input_layernorm.weight", {a_.hidden});
      Add(block + "post_attention_layernorm.weight", {a_.hidden});
    }
    unit_ = static_cast<uint32_t>(a_.head_unit());
    Add("model.norm.weight", {a_.hidden});
    AddHead();
    return std::move(parameters_);
  }

 private:
  void Add(std::string name, std::vector<uint64_t> shape) {
    engine::ParameterSpec& parameter = parameters_.emplace_back();
    parameter.name = std::move(name);
    parameter.shape = std::move(shape);
    parameter.dtype = dtype_;
    parameter.gradient_dtype = gradient_dtype_;
    parameter.unit = unit_;
  }
  void WithBias(const std::string& name, std::vector<uint64_t> shape, uint64_t outputs, bool bias = true) {
    Add(name + ".weight", std::move(shape));
    if (bias) Add(name + ".bias", {outputs});
  }

  void AddHead() {
    if (!a_.tied_embeddings) Add("lm_head.weight", {a_.vocabulary, a_.hidden});
  }

  void AddAttention(const std::string& at) {
    const uint64_t q = a_.query_width(), k = a_.key_width(), v = a_.value_width(), o = a_.attention_output_width();
    if (a_.attention_sinks) Add(at + "sinks", {a_.query_heads});
    if (a_.fused_projections) {
      WithBias(at + "o_proj", {a_.hidden, o}, a_.hidden, a_.output_bias);
      WithBias(at + "qkv_proj", {q + k + v, a_.hidden}, q + k + v, a_.attention_biases);
    } else {
      WithBias(at + "q_proj", {q, a_.hidden}, q, a_.attention_biases);
      WithBias(at + "k_proj", {k, a_.hidden}, k, a_.attention_biases);
      WithBias(at + "v_proj", {v, a_.hidden}, v, a_.attention_biases);
      WithBias(at + "o_proj", {a_.hidden, o}, a_.hidden, a_.output_bias);
    }
    if (a_.query_key_norms) {
      Add(at + "q_norm.weight", {a_.head_dimension});
      Add(at + "k_norm.weight", {a_.head_dimension});
    }
  }

  void AddMlp(const std::string& mlp) {
    if (a_.gated_feed_forward && a_.fused_projections) {
      Add(mlp + "gate_up_proj.weight", {2 * a_.feed_forward, a_.hidden});
    } else {
      if (a_.gated_feed_forward) Add(mlp + "gate_proj.weight", {a_.feed_forward, a_.hidden});
      Add(mlp + "up_proj.weight", {a_.feed_forward, a_.hidden});
    }
    Add(mlp + "down_proj.weight", {a_.hidden, a_.feed_forward});
  }

  // GPT-OSS keeps its experts' matrices transposed and calls the router by that name; Qwen3 does neither.
  void AddExperts(const std::string& mlp) {
    const uint64_t inner = (a_.gated_feed_forward ? 2 : 1) * a_.feed_forward;
    if (a_.expert_biases) {
      WithBias(mlp + "router", {a_.experts, a_.hidden}, a_.experts);
      Add(mlp + "experts.gate_up_proj", {a_.experts, a_.hidden, inner});
      Add(mlp + "experts.gate_up_proj_bias", {a_.experts, inner});
      Add(mlp + "experts.down_proj", {a_.experts, a_.feed_forward, a_.hidden});
      Add(mlp + "experts.down_proj_bias", {a_.experts, a_.hidden});
    } else {
      Add(mlp + "experts.gate_up_proj", {a_.experts, inner, a_.hidden});
      Add(mlp + "experts.down_proj", {a_.experts, a_.hidden, a_.feed_forward});
      Add(mlp + "gate.weight", {a_.experts, a_.hidden});
    }
  }

  const Architecture& a_;
  const kernels::DType dtype_, gradient_dtype_;
  uint32_t unit_ = 0;
  std::vector<engine::ParameterSpec> parameters_;
};

bool IsBias(std::string_view name) { return name.ends_with("bias"); }

bool IsExperts(std::string_view name) {
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(std::string(name), '.'))) {
    if (part == "experts") return true;
  }
  return false;
}

}  // namespace

absl::Status Complete(Architecture& architecture) {
  Architecture& a = architecture;
  if (a.key_value_heads == 0) a.key_value_heads = a.query_heads;
  if (a.head_dimension == 0 && a.query_heads > 0) a.head_dimension = a.hidden / a.query_heads;
  for (const Bound& bound : kBounds) {
    if (const uint64_t value = a.*bound.field; value < bound.least || value > bound.most) {
      return absl::InvalidArgumentError(
          absl::StrCat("architecture.", bound.name, " is ", value, " but must be ", bound.least, " to ", bound.most));
    }
  }
  if (a.experts > 0 && (a.experts_per_token == 0 || a.experts_per_token > a.experts)) {
    return absl::InvalidArgumentError(absl::StrCat("architecture.experts_per_token is ", a.experts_per_token,
                                                   " but must be 1 to ", a.experts, ", the number of experts"));
  }
  if (a.windowed_layers > a.layers || (a.windowed_layers > 0 && a.window == 0)) {
    return absl::InvalidArgumentError(absl::StrCat("architecture.windowed_layers is ", a.windowed_layers,
                                                   " with a window of ", a.window,
                                                   " tokens; give a window, and at most as many layers as there are"));
  }
  return absl::OkStatus();
}

absl::Status CheckCanBeMade(const Architecture& a) {
  for (const auto& [name, value] : {std::pair{"query_latent", a.query_latent},
                                    {"key_value_latent", a.key_value_latent},
                                    {"shared_experts", a.shared_experts}}) {
    if (value == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("architecture.", name, " is ", value,
                                                   ": the parameters of such a model must be listed, as a plan of a "
                                                   "Hugging Face configuration lists them"));
  }
  return absl::OkStatus();
}

std::vector<engine::ParameterSpec> MakeParameters(const Architecture& architecture, kernels::DType dtype,
                                                  kernels::DType gradient_dtype) {
  Builder builder(architecture, dtype, gradient_dtype);
  return architecture.biases ? std::move(builder).Gpt2() : std::move(builder).Llama();
}

double MatrixElementsPerToken(const Model& model, const engine::ParameterSpec& parameter) {
  const Architecture& a = model.architecture;
  if (parameter.shape.size() < 2 || IsBias(parameter.name)) return 0;
  const bool looked_up = parameter.unit == 0 && !a.tied_embeddings;
  const bool positions = parameter.unit == 0 && parameter.shape[0] != a.vocabulary;
  if (looked_up || positions) return 0;
  const double share = a.experts > 0 && IsExperts(parameter.name)
                           ? static_cast<double>(a.experts_per_token) / static_cast<double>(a.experts)
                           : 1;
  return share * static_cast<double>(engine::ElementCount(parameter));
}

std::vector<double> MatrixFlopsPerToken(const Model& model) {
  std::vector<double> flops(model.architecture.head_unit() + 1);
  for (const engine::ParameterSpec& parameter : model.parameters) {
    // What is multiplied of unit 0 is a tied embedding, as the head.
    const size_t unit = parameter.unit == 0 ? flops.size() - 1 : std::min<size_t>(parameter.unit, flops.size() - 1);
    flops[unit] += 2 * MatrixElementsPerToken(model, parameter);
  }
  return flops;
}

double ScoreFlopsPerPair(const Architecture& a) {
  return 2 * static_cast<double>(a.query_width() + a.attention_output_width());
}

double AttentionFlopsPerToken(const Architecture& a, uint64_t sequence) {
  // A token looks at (sequence + 1) / 2 tokens on average; in a window of w < sequence at w, but for the first ones.
  const double s = static_cast<double>(sequence);
  const double w = static_cast<double>(std::min(a.window, sequence));
  const double seen = (s + 1) / 2, seen_in_window = w - w * (w - 1) / (2 * s);
  const double windowed = static_cast<double>(a.windowed_layers) / static_cast<double>(a.layers);
  return ScoreFlopsPerPair(a) * (windowed * seen_in_window + (1 - windowed) * seen);
}

uint64_t ParameterCount(const Model& model) {
  uint64_t count = 0;
  for (const engine::ParameterSpec& parameter : model.parameters) count += engine::ElementCount(parameter);
  return count;
}

uint64_t ActiveParameterCount(const Model& model) {
  double count = 0;
  for (const engine::ParameterSpec& parameter : model.parameters) count += MatrixElementsPerToken(model, parameter);
  return static_cast<uint64_t>(count);
}

}  // namespace superoffload::simulator
