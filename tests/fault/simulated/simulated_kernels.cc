#include "tests/fault/simulated/simulated_kernels.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/algorithm.h"
#include "kernels/cuda/kernels.cuh"
#include "kernels/elements/elements.h"
#include "tests/fault/simulated/ground.h"

namespace superoffload::faults {
namespace {

// Reads the table and the tensors now. Tensors have the slot's dtype.
void RunPack(const kernels::PackArguments& pack) {
  if (pack.dtype != pack.slot.dtype) Fail("a gradient is to be cast");
  const size_t width = kernels::DTypeBytes(pack.dtype);
  auto* const slot = static_cast<std::byte*>(pack.slot.data);
  std::memset(slot, 0, pack.elements * width);
  for (uint32_t i = 0; i < pack.table.count; ++i) {
    const kernels::PackedTensor& tensor = pack.table.tensors[i];
    if (tensor.first + tensor.elements > pack.elements) Fail("a tensor ends behind its bucket");
    std::memcpy(slot + tensor.first * width, tensor.data, tensor.elements * width);
  }
  for (uint64_t first = 0; first < pack.elements; first += kernels::kChunkElements) {
    pack.chunk_sums[first / kernels::kChunkElements] = kernels::SumOfSquares(
        std::min<uint64_t>(kernels::kChunkElements, pack.elements - first), {slot + first * width, pack.slot.dtype});
  }
}

}  // namespace

std::function<void()> BindKernel(std::string_view name, void** arguments) {
  if (name.starts_with("superoffload_pack_")) {
    return [pack = *static_cast<const kernels::PackArguments*>(arguments[0])] { RunPack(pack); };
  }
  for (const kernels::Algorithm* algorithm : kernels::Algorithms()) {
    if (algorithm->resident_kernel == nullptr || name != algorithm->resident_kernel) continue;
    return [algorithm, update = *static_cast<const kernels::ResidentArguments*>(arguments[0])] {
      algorithm->scalar().plain(0, update.elements, update.state, update.constants, update.gradient, update.theta);
    };
  }
  Fail("kernel ", std::string(name), " is launched");
}

}  // namespace superoffload::faults
