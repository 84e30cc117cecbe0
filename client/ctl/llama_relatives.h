// The parameters of Llama and its relatives: blocks of attention, feed-forward or experts, and two norms, by the same
// names.
#ifndef SUPEROFFLOAD_CLIENT_CTL_LLAMA_RELATIVES_H_
#define SUPEROFFLOAD_CLIENT_CTL_LLAMA_RELATIVES_H_

#include <cstdint>
#include <set>

#include "client/ctl/listed_parameters.h"
#include "superoffload/v1/plan.pb.h"

namespace superoffload::ctl {

// How experts and their router are kept.
enum class Routing { kNone, kQwen, kGptOss, kDeepSeek };

// What tells one relative from another, besides the numbers of its architecture.
struct Relative {
  bool query_key_value_biases = false;
  bool output_bias = false;
  bool feed_forward_biases = false;
  bool query_key_norms = false;
  bool fused = false;
  bool sinks = false;
  uint64_t rotary_dimension = 0;  // of latent attention
  Routing routing = Routing::kNone;
  uint64_t dense_feed_forward = 0;       // of the layers that are not routed
  std::set<uint64_t> dense_layers = {};  // where there is routing
};

// Embedding, blocks, norm and head. With a key_value_latent attention is DeepSeek-V3's.
void AddRelative(const v1::Architecture& a, const Relative& is, ListedParameters& to);

}  // namespace superoffload::ctl

#endif  // SUPEROFFLOAD_CLIENT_CTL_LLAMA_RELATIVES_H_
