#include "server/simulator/activations.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace superoffload::simulator {
namespace {

constexpr double kElement = 2, kFloat = 4;

double Real(uint64_t value) { return static_cast<double>(value); }

// Stored of the feed-forward per token and expert that it passes: the input, what the nonlinearity takes and what the
// last product takes; with a gate, of gate and up the outputs, the gate's nonlinearity and the product.
double FeedForwardBytes(const Architecture& a) {
  return kElement * (Real(a.hidden) + (a.gated_feed_forward ? 4 : 2) * Real(a.feed_forward));
}

double HeadBytes(const Architecture& a, const Pass& pass) {
  if (pass.loss == Loss::kWhole) return pass.tokens() * kLogitBytes * Real(a.vocabulary);
  return Real(LossChunk(a, pass)) * kLogitBytes * Real(a.vocabulary) + pass.tokens() * kElement * Real(a.hidden) +
         kElement * Real(a.vocabulary) * Real(a.hidden);
}

// Feed-forwards that a token passes; of them, those to which it is routed.
double Routes(const Architecture& a) { return a.experts > 0 ? Real(a.experts_per_token) : 1; }
double Copies(const Architecture& a) { return Routes(a) + Real(a.shared_experts); }

}  // namespace

uint64_t OffloadedBlocks(const Architecture& a, const Pass& pass) {
  return static_cast<uint64_t>(std::ceil(Real(a.layers) * pass.offloaded_activations));
}

double BlockInputBytes(const Architecture& a, const Pass& pass) { return pass.tokens() * kElement * Real(a.hidden); }

double BlockBytesPerToken(const Architecture& a) {
  const double norms = 2 * kElement * Real(a.hidden);
  // Its input; query, key and value, and latents before and behind their norms; its output, which the projection takes;
  // one log-sum-exp per head.
  const double latents = 2 * (Real(a.query_latent) + Real(a.key_value_latent));
  const double attention = kElement * (Real(a.hidden) + latents + Real(a.query_width()) + Real(a.key_width()) +
                                       Real(a.value_width()) + Real(a.attention_output_width())) +
                           kFloat * Real(a.query_heads);
  double feed_forward = Copies(a) * FeedForwardBytes(a);
  // Each routed token has a copy of its input, and of its output until it is weighted; the router's scores are fp32.
  if (a.experts > 0) feed_forward += Routes(a) * kElement * Real(a.hidden) + kFloat * Real(a.experts);
  return norms + attention + feed_forward;
}

double ScoreBytesPerToken(const Architecture& a, uint64_t sequence) {
  return (kFloat + kElement) * Real(a.query_heads) * Real(sequence);
}

uint64_t LossChunk(const Architecture& a, const Pass& pass) {
  const uint64_t tokens = pass.batch * pass.sequence, chunks = (a.vocabulary + a.hidden - 1) / a.hidden;
  return std::min(tokens, std::bit_ceil((tokens + chunks - 1) / chunks));
}

double LossChunkTraffic(const Architecture& a, const Pass& pass) {
  if (pass.loss == Loss::kWhole) return 0;
  const uint64_t chunk = LossChunk(a, pass), chunks = (pass.batch * pass.sequence + chunk - 1) / chunk;
  return Real(chunks) * 3 * kElement * Real(a.vocabulary) * Real(a.hidden);  // two are read, their sum is written
}

ActivationBytes ActivationsOf(const Architecture& a, const Pass& pass) {
  const double scores = pass.attention == Attention::kEager ? ScoreBytesPerToken(a, pass.sequence) : 0;
  const double stored = BlockBytesPerToken(a) + (pass.checkpointing == Checkpointing::kNone ? scores : 0);
  const double input = kElement * Real(a.hidden);
  // Gradients of the widest products, and of the block's input and output.
  double working = kElement * (2 * Real(a.hidden) + Copies(a) * (a.gated_feed_forward ? 3 : 1) * Real(a.feed_forward));
  if (pass.checkpointing == Checkpointing::kFull) working += BlockBytesPerToken(a);
  if (pass.checkpointing != Checkpointing::kNone) working += scores;
  const double kept = pass.checkpointing == Checkpointing::kFull ? input : stored;
  const uint64_t gone = OffloadedBlocks(a, pass), under_way = std::min(gone, kInputsUnderWay);
  return {.blocks = pass.tokens() * (Real(a.layers - gone + under_way) * kept + input),  // and the last norm's input
          .host = Real(gone) * BlockInputBytes(a, pass),
          .working = pass.tokens() * working,
          .head = HeadBytes(a, pass)};
}

}  // namespace superoffload::simulator
