#include "server/engine/absorb.h"

#include <algorithm>

#include "server/engine/segments.h"

namespace superoffload::engine {

void AbsorbRange(const Layout& layout, const ChunkView& view, size_t index, const ElementRange& range,
                 const std::vector<Segment>& segments, kernels::ConstElements gradient,
                 const kernels::AlgorithmKernels& kernels, uint64_t seed, kernels::UndoSlot* undo) {
  ForEachSegment(segments, index, view.elements, [&](size_t first, size_t end, const Segment& segment) {
    first = std::max(first, range.begin);
    end = std::min(end, range.end);
    if (first >= end) return;
    kernels::BeginRange(*undo, first);
    kernels.absorb(first, end, StateOf(layout, view, segment.parameter, seed), *segment.absorb, gradient, undo);
  });
}

}  // namespace superoffload::engine
