#include "kernels/cuda/kernels.cuh"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "kernels/algorithm.h"
#include "kernels/elements/elements.h"
#include "kernels/elements/scalar_element.h"
#include "tests/support/fake_cuda/launch.h"
#include "tests/unit/kernels/cuda/fake_cuda.h"

// A thread of the host for each of a block's would take long; the kernel's result does not depend on how many there
// are.
namespace superoffload::kernels {
inline constexpr unsigned kFakePackThreads = 32, kRealPackThreads = kPackThreads;
}
#define kPackThreads kFakePackThreads
// After fake_cuda.h.
#include "kernels/cuda/pack.cu"
#include "kernels/cuda/resident.cu"

namespace superoffload::fake_cuda {
namespace {

using kernels::PackArguments;
using kernels::PackedTensor;
using kernels::ResidentArguments;

void RunAlone(const std::function<void()>& kernel) {
  static std::mutex* const one = new std::mutex;  // the fake's blocks share globals
  std::lock_guard lock(*one);
  kernel();
}

// Has the pointer be where its memory is. False: there is none.
template <typename T>
bool Find(const Process& process, T** pointer, size_t bytes) {
  *pointer = static_cast<T*>(process.memory().OnGpu(*pointer, bytes));
  return *pointer != nullptr;
}

using PackCode = void (*)(PackArguments);
using ResidentCode = void (*)(ResidentArguments);

// The bits of pack.cu, whose threads wait for each other, by one thread.
void PackAlone(const PackArguments& a) {
  const size_t width = kernels::DTypeBytes(a.slot.dtype);
  auto* const slot = static_cast<std::byte*>(a.slot.data);
  uint64_t filled = 0;
  const auto fill_gap = [&](uint64_t end) {
    for (; !a.adds && filled < end; ++filled) kernels::StoreElement(a.slot, filled, a.gap);
  };
  for (const PackedTensor& tensor : std::span(a.table.tensors, a.table.count)) {
    fill_gap(tensor.first);
    filled = tensor.first + tensor.elements;
    if (a.dtype == a.slot.dtype && !a.adds) {
      std::memmove(slot + tensor.first * width, tensor.data, tensor.elements * width);  // may be there already
      continue;
    }
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      const float value = kernels::LoadElement({tensor.data, a.dtype}, i);
      const uint64_t place = tensor.first + i;
      kernels::StoreElement(a.slot, place, a.adds ? kernels::LoadElement({slot, a.slot.dtype}, place) + value : value);
    }
  }
  fill_gap(a.elements);
  for (uint64_t first = 0; first < a.elements; first += kernels::kChunkElements) {
    a.chunk_sums[first / kernels::kChunkElements] = kernels::SumOfSquares(
        std::min<uint64_t>(kernels::kChunkElements, a.elements - first), {slot + first * width, a.slot.dtype});
  }
}

// `block`: of the GPU's threads, of which each of the fake's stands for some.
void Pack(Process& process, PackCode code, kernels::DType from, kernels::DType to, PackArguments a, unsigned grid,
          unsigned block) {
  const uint64_t chunks = (a.elements + kernels::kChunkElements - 1) / kernels::kChunkElements;
  std::vector<PackedTensor> tensors(a.table.count);
  bool found = a.dtype == from && a.slot.dtype == to;
  if (a.table.count > 0) {
    found = found && Find(process, &a.table.tensors, tensors.size() * sizeof(PackedTensor)) &&
            Find(process, &a.table.chunk_begins, (chunks + 1) * sizeof(uint32_t));
    if (found) std::memcpy(tensors.data(), a.table.tensors, tensors.size() * sizeof(PackedTensor));
  }
  for (PackedTensor& tensor : tensors) {
    found = found && tensor.first + tensor.elements <= a.elements &&
            Find(process, &tensor.data, tensor.elements * kernels::DTypeBytes(a.dtype));
  }
  if (!found || !Find(process, &a.slot.data, a.elements * kernels::DTypeBytes(a.slot.dtype)) ||
      !Find(process, &a.chunk_sums, chunks * sizeof(double))) {
    return process.SetFault();
  }
  a.table.tensors = tensors.data();
  if (!process.has_threads()) return PackAlone(a);
  const unsigned threads = block * kernels::kFakePackThreads / kernels::kRealPackThreads;
  RunAlone([&] { LaunchFake(code, grid, threads, a); });
}

// The host takes too long for what nobody looks at: the time is a GPU's.
void Product(Process& process, kernels::ProductArguments p, unsigned, unsigned) {
  const size_t bytes = size_t{p.n} * p.n * sizeof(float);
  if (!Find(process, &p.a, bytes) || !Find(process, &p.b, bytes) || !Find(process, &p.c, bytes)) {
    return process.SetFault();
  }
  std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Resident(Process& process, const char* name, ResidentCode code, ResidentArguments a, unsigned grid,
              unsigned block) {
  const auto of_kernel = std::ranges::find_if(kernels::Algorithms(), [name](const kernels::Algorithm* algorithm) {
    return algorithm->resident_kernel != nullptr && std::strcmp(algorithm->resident_kernel, name) == 0;
  });
  const kernels::Algorithm& algorithm = **of_kernel;
  bool found = true;
  for (size_t i = 0; i < algorithm.arrays.size(); ++i) {
    found = found && Find(process, &a.state.arrays[i], algorithm.arrays[i].Bytes(a.elements));
  }
  if (!found || !Find(process, &a.gradient.data, a.elements * kernels::DTypeBytes(a.gradient.dtype)) ||
      !Find(process, &a.theta.data, a.elements * kernels::DTypeBytes(a.theta.dtype))) {
    return process.SetFault();
  }
  // Threads that wait for each other are one.
  RunAlone(
      [&] { algorithm.block_elements > 1 ? LaunchFake(code, grid, 1, a) : LaunchFakeInTurn(code, grid, block, a); });
}

// `run(process, arguments, blocks, threads)`.
template <typename Arguments, typename Run>
Kernel Of(const char* name, unsigned most_threads, unsigned static_bytes, Run run) {
  return {name, most_threads, static_bytes, [run](Process& process, void** arguments, unsigned grid, unsigned block) {
            return [=, &process, a = *static_cast<Arguments*>(arguments[0])] { run(process, a, grid, block); };
          }};
}

// Registers need no count: with at most 256 threads, none of which can have more than 255, a block's 64 Ki suffice.
const std::vector<Kernel>& Kernels() {
  static const auto* const all = new std::vector<Kernel>{
#define X(kernel, from, to)                                                                                     \
  Of<PackArguments>(#kernel, kernels::kRealPackThreads, kernels::kPackSharedBytes,                              \
                    [](Process& process, const PackArguments& a, unsigned grid, unsigned block) {               \
                      Pack(process, kernels::kernel, kernels::DType::from, kernels::DType::to, a, grid, block); \
                    }),
      SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(X)
#undef X
#define X(kernel, ...)                                                                                    \
  Of<ResidentArguments>(#kernel, kernels::kResidentThreads, 0,                                            \
                        [](Process& process, const ResidentArguments& a, unsigned grid, unsigned block) { \
                          Resident(process, #kernel, kernels::kernel, a, grid, block);                    \
                        }),
          SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(X)
#undef X
              Of<kernels::ProductArguments>("superoffload_product", kernels::kProductTile * kernels::kProductTile,
                                            kernels::kProductStaticBytes, Product)};
  return *all;
}

}  // namespace

const Kernel* FindKernel(const char* name) {
  for (const Kernel& kernel : Kernels()) {
    if (std::strcmp(name, kernel.name) == 0) return &kernel;
  }
  return nullptr;
}

}  // namespace superoffload::fake_cuda
