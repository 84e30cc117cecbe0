#include "tests/support/fake_cuda/kernels.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
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
inline constexpr unsigned kFakePackThreads = 32;
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

const char kProduct[] = "superoffload_product";

std::mutex shared_mu;
std::map<const void*, unsigned> allowed_shared;

struct PackKernel {
  const char* name;
  kernels::DType from, to;
  void (*run)(PackArguments);
};
constexpr PackKernel kPack[] = {
#define X(kernel, from, to) {#kernel, kernels::DType::from, kernels::DType::to, kernels::kernel},
    SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(X)
#undef X
};

struct ResidentKernel {
  const char* name;
  void (*run)(ResidentArguments);
};
constexpr ResidentKernel kResident[] = {
#define X(kernel, Formula) {#kernel, kernels::kernel},
    SUPEROFFLOAD_FOR_EACH_RESIDENT_KERNEL(X)
#undef X
};

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

void Pack(const PackKernel& kernel, PackArguments a, unsigned grid) {
  const uint64_t chunks = (a.elements + kernels::kChunkElements - 1) / kernels::kChunkElements;
  std::vector<PackedTensor> tensors(a.table.count);
  bool found = a.dtype == kernel.from && a.slot.dtype == kernel.to;
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
  RunAlone([&] { LaunchFake(kernel.run, grid, kernels::kPackThreads, a); });
}

// The host takes too long for what nobody looks at: the time is a GPU's.
void Product(kernels::ProductArguments p) {
  const size_t bytes = size_t{p.n} * p.n * sizeof(float);
  if (!Find(&p.a, bytes) || !Find(&p.b, bytes) || !Find(&p.c, bytes)) return SetFault();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Resident(const ResidentKernel& kernel, ResidentArguments a, unsigned grid, unsigned block) {
  bool found = true;
  for (void*& array : a.state.arrays) found = found && (array == nullptr || Find(&array, a.elements * sizeof(float)));
  if (!found || !Find(&a.gradient.data, a.elements * kernels::DTypeBytes(a.gradient.dtype)) ||
      !Find(&a.theta.data, a.elements * kernels::DTypeBytes(a.theta.dtype))) {
    SetFault();
    return;
  }
  RunAlone([&] { LaunchFakeInTurn(kernel.run, grid, block, a); });
}

}  // namespace

const void* FindKernel(const char* name) {
  for (const PackKernel& known : kPack) {
    if (std::strcmp(name, known.name) == 0) return &known;
  }
  if (std::strcmp(name, kProduct) == 0) return kProduct;
  for (const ResidentKernel& known : kResident) {
    if (std::strcmp(name, known.name) == 0) return &known;
  }
  return nullptr;
}

const char* NameOf(const void* kernel) {
  for (const PackKernel& known : kPack) {
    if (kernel == &known) return known.name;
  }
  return kernel == kProduct ? kProduct : static_cast<const ResidentKernel*>(kernel)->name;
}

int AllowShared(const void* kernel, int dynamic_bytes) {
  const unsigned own = kernel == kProduct ? kernels::kProductStaticBytes : 0;
  if (dynamic_bytes < 0 || own + static_cast<unsigned>(dynamic_bytes) > ThisMachine().shared_bytes) return kInvalidValue;
  std::lock_guard lock(shared_mu);
  allowed_shared[kernel] = static_cast<unsigned>(dynamic_bytes);
  return 0;
}

int Launch(const void* kernel, unsigned grid, unsigned block, unsigned dynamic_bytes, void* stream, void** arguments) {
  constexpr unsigned kUnasked = 48 << 10;
  {
    std::lock_guard lock(shared_mu);
    if (grid == 0 || dynamic_bytes > std::max(kUnasked, allowed_shared[kernel])) return kInvalidValue;
  }
  for (const PackKernel& known : kPack) {
    if (kernel != &known) continue;
    return Issue(stream, [&known, grid, a = *static_cast<PackArguments*>(arguments[0])] { Pack(known, a, grid); });
  }
  if (kernel == kProduct) {
    return Issue(stream, [p = *static_cast<kernels::ProductArguments*>(arguments[0])] { Product(p); });
  }
  return Issue(stream, [kernel, grid, block, a = *static_cast<ResidentArguments*>(arguments[0])] {
    Resident(*static_cast<const ResidentKernel*>(kernel), a, grid, block);
  });
}

int Fault() { return fault; }
void SetFault() { fault = kIllegalAddress; }

}  // namespace superoffload::fake_cuda
