// The daemon's layout of a model or of a rank's share of it, and which of its buckets the model's units use.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_MODEL_LAYOUT_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_MODEL_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/algorithm.h"
#include "server/engine/layout.h"
#include "server/engine/spec.h"
#include "server/simulator/architecture.h"

namespace superoffload::simulator {

// Whether a block is smaller than every bucket may be (engine::kTaperBytes), so that blocks share buckets; also where
// there are none. `unit` of what comes before the first block is 0, and of what comes behind the last one the largest.
bool HasSmallBlocks(const std::vector<engine::ParameterSpec>& parameters);

// What rank `rank` of `ranks` would create: FSDP2's shards, which are torch.chunk's along the first dimension, the
// whole when there is one rank; blocks count as units unless they are small. Parameters of which the rank has nothing
// are missing; rank 0 has something of each.
engine::OptimizerSpec ShardOf(const engine::OptimizerSpec& spec, uint32_t rank, uint32_t ranks);

// As the adapters ask for it (stored.py): where `algorithm` keeps state in 8 bits, vectors, small parameters and
// embeddings keep it in fp32.
void KeepSomeInFp32(const kernels::Algorithm& algorithm, std::vector<engine::ParameterSpec>& parameters);

// Of rank 0, whose shards are the largest. The model must be valid; `spec` has no groups and no parameters, they are
// its.
engine::Layout LayoutOf(const Model& model, engine::OptimizerSpec spec = {}, uint32_t ranks = 1);

struct BucketUse {
  std::vector<size_t> units;  // whose parameters it holds; backward reaches the first one last
  double complete_at = 1;     // the part of that unit's backward pass after which its gradient is complete
};

// By bucket. Within a unit gradients are complete in reverse order of registration, as far apart as their sizes: a
// product's time goes with its matrix.
std::vector<BucketUse> BucketUses(const Model& model, const engine::Layout& layout);

// By unit: the buckets with parameters of it, in the order in which backward completes them.
std::vector<std::vector<uint32_t>> BucketsOfUnits(const std::vector<BucketUse>& uses, size_t units);

// By bucket: the block with which its parameters stream to the GPU, where a share of the blocks does, 0 to 1, evenly
// among the others (streams.py of the PyTorch adapter); 0: they stay there.
std::vector<uint32_t> StreamedUnits(const Architecture& architecture, const std::vector<BucketUse>& uses, double share);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_MODEL_LAYOUT_H_
