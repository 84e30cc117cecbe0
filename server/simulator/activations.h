// How much GPU memory the activations of a training pass take.
//
// Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4: what a
// block of a GPT stores for its backward pass, tensor by tensor. Adapted to grouped-query attention, gated
// feed-forwards, experts and FlashAttention, without dropout, in 2 bytes per element. It holds for fused norms; eager
// ones that compute in fp32 store more.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_ACTIVATIONS_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_ACTIVATIONS_H_

#include <cstdint>

#include "server/simulator/architecture.h"

namespace superoffload::simulator {

enum class Checkpointing {
  kNone,
  kSelective,  // scores and softmax of the attention are computed again
  kFull,       // only the input of each block stays
};

enum class Attention {
  kFlash,  // stores no scores
  kEager,  // stores them
};

enum class Loss {
  kWhole,    // the logits of all tokens are in memory at once
  kChunked,  // those of a chunk of tokens at a time, with their gradients
};

struct Pass {
  uint64_t batch = 1;
  uint64_t sequence = 1;
  Checkpointing checkpointing = Checkpointing::kFull;
  Attention attention = Attention::kFlash;
  Loss loss = Loss::kWhole;
  // The share of the blocks whose inputs wait on the host for their backward pass, the first of them; of kFull.
  double offloaded_activations = 0;

  double tokens() const { return static_cast<double>(batch) * static_cast<double>(sequence); }
};

// Of blocks whose inputs wait on the host: one leaves and one comes back beside what is computed.
inline constexpr uint64_t kInputsUnderWay = 2;

// Bytes. Doubles, because a search tries sizes that no memory has.
struct ActivationBytes {
  double blocks = 0;   // what all blocks store between forward and backward, on the GPU
  double host = 0;     // and on the host
  double working = 0;  // what the block that is in backward takes beside it: what it computes again, and gradients
  double head = 0;     // logits, their softmax and their gradient; of a chunked loss, see below

  // The head's pass is over before the first block's backward begins.
  double peak() const { return blocks + (working > head ? working : head); }
};

// How many blocks' inputs wait on the host.
uint64_t OffloadedBlocks(const Architecture& architecture, const Pass& pass);

double BlockInputBytes(const Architecture& architecture, const Pass& pass);

// Stored by one block per token, but the attention's scores.
double BlockBytesPerToken(const Architecture& architecture);

// Scores of one block per token: softmax in fp32 and in 2 bytes.
double ScoreBytesPerToken(const Architecture& architecture, uint64_t sequence);

inline constexpr double kLogitBytes = 10;  // 2 of the output, 4 of its fp32 log-softmax, 4 of the gradient

// A chunked loss computes a chunk's logits, their gradient and what that adds to the gradients of the hidden states and
// of the head, then the next chunk's. It keeps
//
//     one chunk's logits              chunk x vocabulary x kLogitBytes; kernels that work in place take less
//     gradient of the hidden states   tokens x hidden x 2
//     a chunk's product               vocabulary x hidden x 2, until it is added to the head's gradient
//
// The head's gradient itself is in the plan with all other gradients. Chunks are those of Liger's fused linear cross
// entropy (ops/fused_linear_cross_entropy.py): the tokens times hidden / vocabulary, rounded up to a power of two, so
// that a chunk's logits are about as many as the elements of all hidden states.
uint64_t LossChunk(const Architecture& architecture, const Pass& pass);  // tokens

// Bytes that a pass moves to add up the head's gradient from the chunks' products; 0 where the loss is not chunked.
double LossChunkTraffic(const Architecture& architecture, const Pass& pass);

ActivationBytes ActivationsOf(const Architecture& architecture, const Pass& pass);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_ACTIVATIONS_H_
