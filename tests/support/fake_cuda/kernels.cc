#include "tests/support/fake_cuda/kernels.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <vector>

#include "kernels/adam/adam_element.h"
#include "kernels/cuda/kernels.cuh"
#include "tests/support/fake_cuda/machine.h"
#include "tests/support/fake_cuda/memory.h"
#include "tests/support/fake_cuda/stream.h"
#include "tests/unit/kernels/fake_cuda.h"

// A thread of the host for each of a block's would take long; the kernel's result does not depend on how many there
// are.
namespace superoffload::kernels {
inline constexpr unsigned kFakePackThreads = 16;
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

const char kPack[] = "superoffload_pack", kResident[] = "superoffload_resident_adam";

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

void Pack(PackArguments a, unsigned grid) {
  std::vector<PackedTensor> tensors(a.tensor_count);
  bool found = a.tensor_count == 0 || Find(&a.tensors, tensors.size() * sizeof(PackedTensor));
  if (found && a.tensor_count > 0) std::memcpy(tensors.data(), a.tensors, tensors.size() * sizeof(PackedTensor));
  for (PackedTensor& tensor : tensors) {
    found = found && Find(&tensor.data, tensor.elements * kernels::DTypeBytes(a.dtype));
  }
  if (!found || !Find(&a.slot.data, a.elements * kernels::DTypeBytes(a.slot.dtype)) ||
      !Find(&a.chunk_sums, grid * sizeof(double))) {
    SetFault();
    return;
  }
  a.tensors = tensors.data();
  RunAlone([&] { LaunchFake(kernels::superoffload_pack, grid, kernels::kPackThreads, a); });
}

void Resident(ResidentArguments a, unsigned grid, unsigned block) {
  const size_t bytes = a.elements * sizeof(float);
  if (!Find(&a.state.p, bytes) || !Find(&a.state.m, bytes) || !Find(&a.state.v, bytes) ||
      !Find(&a.gradient.data, a.elements * kernels::DTypeBytes(a.gradient.dtype)) ||
      !Find(&a.theta.data, a.elements * kernels::DTypeBytes(a.theta.dtype))) {
    SetFault();
    return;
  }
  RunAlone([&] { LaunchFakeInTurn(kernels::superoffload_resident_adam, grid, block, a); });
}

}  // namespace

const void* FindKernel(const char* name) {
  for (const char* known : {kPack, kResident}) {
    if (std::strcmp(name, known) == 0) return known;
  }
  return nullptr;
}

int Launch(const void* kernel, unsigned grid, unsigned block, void* stream, void** arguments) {
  if (kernel == kPack) {
    return Issue(stream, [grid, a = *static_cast<PackArguments*>(arguments[0])] { Pack(a, grid); });
  }
  return Issue(stream,
               [grid, block, a = *static_cast<ResidentArguments*>(arguments[0])] { Resident(a, grid, block); });
}

int Fault() { return fault; }
void SetFault() { fault = kIllegalAddress; }

}  // namespace superoffload::fake_cuda
