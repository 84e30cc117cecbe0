#include "tests/support/fake_cuda/kernels.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/algorithm.h"
#include "kernels/cuda/kernels.cuh"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/fake_cuda/memory.h"
#include "tests/support/fake_cuda/stream.h"
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

std::atomic<int> fault = 0;

void RunAlone(const std::function<void()>& kernel) {
  static std::mutex* const one = new std::mutex;  // the fake's blocks share globals
  std::lock_guard lock(*one);
  kernel();
}

// Has the pointer be where its memory is. False: there is none.
template <typename T>
bool Find(T** pointer, size_t bytes) {
  *pointer = static_cast<T*>(OnGpu(*pointer, bytes));
  return *pointer != nullptr;
}

using PackCode = void (*)(PackArguments);
using ResidentCode = void (*)(ResidentArguments);

// `block`: of the GPU's threads, of which each of the fake's stands for some.
void Pack(PackCode code, kernels::DType from, kernels::DType to, PackArguments a, unsigned grid, unsigned block) {
  const uint64_t chunks = (a.elements + kernels::kChunkElements - 1) / kernels::kChunkElements;
  std::vector<PackedTensor> tensors(a.table.count);
  bool found = a.dtype == from && a.slot.dtype == to;
  if (a.table.count > 0) {
    found = found && Find(&a.table.tensors, tensors.size() * sizeof(PackedTensor)) &&
            Find(&a.table.chunk_begins, (chunks + 1) * sizeof(uint32_t));
    if (found) std::memcpy(tensors.data(), a.table.tensors, tensors.size() * sizeof(PackedTensor));
  }
  for (PackedTensor& tensor : tensors) {
    found = found && Find(&tensor.data, tensor.elements * kernels::DTypeBytes(a.dtype));
  }
  if (!found || !Find(&a.slot.data, a.elements * kernels::DTypeBytes(a.slot.dtype)) ||
      !Find(&a.chunk_sums, chunks * sizeof(double))) {
    SetFault();
    return;
  }
  a.table.tensors = tensors.data();
  const unsigned threads = block * kernels::kFakePackThreads / kernels::kRealPackThreads;
  RunAlone([&] { LaunchFake(code, grid, threads, a); });
}

// The host takes too long for what nobody looks at: the time is a GPU's.
void Product(kernels::ProductArguments p) {
  const size_t bytes = size_t{p.n} * p.n * sizeof(float);
  if (!Find(&p.a, bytes) || !Find(&p.b, bytes) || !Find(&p.c, bytes)) return SetFault();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Resident(ResidentCode code, ResidentArguments a, unsigned grid, unsigned block) {
  bool found = true;
  for (void*& array : a.state.arrays) found = found && (array == nullptr || Find(&array, a.elements * sizeof(float)));
  if (!found || !Find(&a.gradient.data, a.elements * kernels::DTypeBytes(a.gradient.dtype)) ||
      !Find(&a.theta.data, a.elements * kernels::DTypeBytes(a.theta.dtype))) {
    SetFault();
    return;
  }
  RunAlone([&] { LaunchFakeInTurn(code, grid, block, a); });
}

Kernel OfPack(const char* name, kernels::DType from, kernels::DType to, PackCode code) {
  return {name, kernels::kRealPackThreads, kernels::kPackSharedBytes,
          [=](void** arguments, unsigned grid, unsigned block) {
            return [=, a = *static_cast<PackArguments*>(arguments[0])] { Pack(code, from, to, a, grid, block); };
          }};
}

Kernel OfResident(const char* name, ResidentCode code) {
  return {name, kernels::kResidentThreads, 0, [=](void** arguments, unsigned grid, unsigned block) {
            return [=, a = *static_cast<ResidentArguments*>(arguments[0])] { Resident(code, a, grid, block); };
          }};
}

Kernel OfProduct(const char* name) {
  return {name, kernels::kProductTile * kernels::kProductTile, kernels::kProductStaticBytes,
          [](void** arguments, unsigned, unsigned) {
            return [p = *static_cast<kernels::ProductArguments*>(arguments[0])] { Product(p); };
          }};
}

// Registers need no count: with at most 256 threads, none of which can have more than 255, a block's 64 Ki suffice.
const std::vector<Kernel>& Kernels() {
  static const auto* const all = new std::vector<Kernel>{
#define X(kernel, from, to) OfPack(#kernel, kernels::DType::from, kernels::DType::to, kernels::kernel),
      SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(X)
#undef X
#define X(kernel, Formula) OfResident(#kernel, kernels::kernel),
      SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(X)
#undef X
      OfProduct("superoffload_product")};
  return *all;
}

}  // namespace

const Kernel* FindKernel(const char* name) {
  for (const Kernel& kernel : Kernels()) {
    if (std::strcmp(name, kernel.name) == 0) return &kernel;
  }
  return nullptr;
}

int Fault() { return fault; }
void SetFault() { fault = kIllegalAddress; }

}  // namespace superoffload::fake_cuda
