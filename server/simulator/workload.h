// What the GPU computes in one training step, unit by unit: a model, how it is trained, and the seconds that takes.
//
// A unit is a part of the model that runs as a whole (Model in architecture.h): 0 the embeddings, 1 to L the blocks,
// L+1 the last norm and the head. Forward runs them upwards, backward downwards. A parameter belongs to
// `model.parameters[i].unit`; its gradient is complete when that unit's backward is over. The gradient of a tied
// embedding is complete at the very end.
//
// Seconds of a block's forward pass, for T tokens:
//
//     products / (peak * matmul_efficiency) + attention / (peak * attention_efficiency)
//         + T * hidden * block_traffic / memory_bandwidth + block_overhead
//
// Backward takes twice as long, and what is not kept is computed again first (Checkpointing). Fused attention computes
// half of the square of scores; its backward takes 2.5 times its forward, because its kernel computes the scores again
// (five products instead of two; Dao 2023, FlashAttention-2, section 3.1). Eager attention is products over the whole
// square, at matmul_efficiency.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_WORKLOAD_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "server/simulator/activations.h"
#include "server/simulator/architecture.h"
#include "server/simulator/machine.h"

namespace superoffload::simulator {

// GPU seconds of one pass over one micro-batch.
struct UnitSeconds {
  double forward = 0;
  double backward = 0;  // what is computed again included
};

struct Workload {
  Model model;
  Pass pass;                  // of one micro-batch
  uint64_t accumulation = 1;  // micro-batches per step
  uint32_t ranks = 1;         // that share the model's parameters; all else here is of each of them
  std::vector<UnitSeconds> units;
  // The model's own operations, forward and backward: whichever way they are computed, attention is half of the square
  // of scores, and what is computed again is not counted.
  double flops_per_step = 0;

  double tokens_per_step() const { return pass.tokens() * static_cast<double>(accumulation); }
  double forward_seconds() const;   // of one micro-batch
  double backward_seconds() const;  // of one micro-batch
  double compute_seconds() const {
    return (forward_seconds() + backward_seconds()) * static_cast<double>(accumulation);
  }
};

// `accumulation` is at least 1.
Workload MakeWorkload(const GpuModel& gpu, Model model, const Pass& pass, uint64_t accumulation);

// Elements of each unit's parameters.
std::vector<uint64_t> UnitElements(const Model& model);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_WORKLOAD_H_
