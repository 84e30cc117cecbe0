// What training a model takes of the GPU's memory, by purpose, and how much more would fit.
//
// What lies there because of us (parameters, slots, residents) has the sizes of client/src/gpu/gpu_layout.h;
// activations are an estimate (activations.h); context and reserve are assumptions.
#ifndef SUPEROFFLOAD_SERVER_SIMULATOR_FIT_H_
#define SUPEROFFLOAD_SERVER_SIMULATOR_FIT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/engine/layout.h"
#include "server/simulator/activations.h"
#include "server/simulator/architecture.h"

namespace superoffload::simulator {

struct MemoryItem {
  std::string purpose;
  uint64_t bytes = 0;
  std::string formula;
};

struct GpuUse {
  uint32_t device_slots = 8;
  uint32_t resident_buckets = 0;  // at most all are
  uint32_t accumulation = 1;
  bool sums_on_host = false;        // gradients of a step's passes are added up there
  double allocator_reserve = 0.05;  // of the memory
  double streamed_weights = 0;      // the share of the blocks whose parameters stream (StreamedUnits)
  uint32_t stream_slots = 3;
  bool gathers = false;  // the parameters of the layout are a share: blocks are gathered whole to be computed
};

// CUDA context, kernels and libraries of a PyTorch process. Assumed; between 0.5 and 1.5 GB are common on H100.
inline constexpr uint64_t kContextBytes = uint64_t{1200} << 20;

// In the order in which they are shown.
std::vector<MemoryItem> GpuMemory(const Model& model, const engine::Layout& layout, const Pass& pass, const GpuUse& use,
                                  uint64_t memory_bytes);

uint64_t TotalBytes(const std::vector<MemoryItem>& items);

// Gradients of all parameters at once, as they stay while a loop is watched or accumulates.
uint64_t AllGradientBytes(const Model& model);

// The largest with which TotalBytes(GpuMemory(...)) is at most `memory_bytes`, all else as given; 0: none.
uint64_t LargestBatch(const Model& model, const engine::Layout& layout, Pass pass, const GpuUse& use,
                      uint64_t memory_bytes);
uint64_t LargestSequence(const Model& model, const engine::Layout& layout, Pass pass, const GpuUse& use,
                         uint64_t memory_bytes);

// A share of the blocks that means `count` of them, in few digits.
double ShareOfBlocks(uint32_t count, uint32_t blocks);

// The fewest blocks whose inputs must wait on the host so that it fits, all else as given; nothing: not even all
// suffice.
std::optional<uint32_t> FewestOffloaded(const Model& model, const engine::Layout& layout, Pass pass, const GpuUse& use,
                                        uint64_t memory_bytes);

// The fewest blocks that must stream so that it fits, all else as given; nothing: not even all suffice.
std::optional<uint32_t> FewestStreamed(const Model& model, const engine::Layout& layout, const Pass& pass, GpuUse use,
                                       uint64_t memory_bytes);

}  // namespace superoffload::simulator

#endif  // SUPEROFFLOAD_SERVER_SIMULATOR_FIT_H_
