// Takes one committed gradient into a range of a chunk's state: what logs are absorbed with, and recovery.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_ABSORB_H_
#define SUPEROFFLOAD_SERVER_ENGINE_ABSORB_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/algorithm.h"
#include "kernels/undo_slot.h"
#include "server/engine/bucket_pass.h"
#include "server/engine/chunk_view.h"

namespace superoffload::engine {

// Elements [begin, end) of a chunk.
struct ElementRange {
  size_t begin = 0, end = 0;
};

// Into `range` of chunk `index` of its bucket, which `view` is of. `segments`: of the step, which all absorb;
// `gradient`: of the chunk. `undo` names the stretch.
void AbsorbRange(const Layout& layout, const ChunkView& view, size_t index, const ElementRange& range,
                 const std::vector<Segment>& segments, kernels::ConstElements gradient,
                 const kernels::AlgorithmKernels& kernels, uint64_t seed, kernels::UndoSlot* undo);

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_ABSORB_H_
