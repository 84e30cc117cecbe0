#include "kernels/cuda/cuda_kernels.h"

#include <algorithm>
#include <utility>

#include "kernels/check.h"

#ifdef SUPEROFFLOAD_FATBIN_DIRECTORY
// The compiled kernels, for every architecture they were built for.
asm(".section .rodata\n"
    ".balign 16\n"
    "superoffload_pack_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/pack.fatbin\"\n"
    ".balign 16\n"
    "superoffload_product_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/product.fatbin\"\n"
    ".balign 16\n"
    "superoffload_resident_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/resident.fatbin\"\n"
    ".previous\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char superoffload_pack_fatbin[],
    superoffload_product_fatbin[], superoffload_resident_fatbin[];
#endif

namespace superoffload::kernels {
namespace {

// Blocks of a kernel that strides: enough to fill any GPU several times over.
constexpr uint64_t kMaxStridingBlocks = 4096;

size_t Index(DType dtype) { return static_cast<size_t>(dtype); }

}  // namespace

void IndexChunks(std::span<const PackedTensor> tensors, uint64_t elements, uint32_t* begins) {
  uint32_t tensor = 0;
  const uint64_t chunks = (elements + kChunkElements - 1) / kChunkElements;
  for (uint64_t chunk = 0; chunk <= chunks; ++chunk) {
    const uint64_t begin = chunk * kChunkElements;
    while (tensor < tensors.size() && tensors[tensor].first + tensors[tensor].elements <= begin) ++tensor;
    begins[chunk] = tensor;
  }
}

CudaStatus CudaKernels::Load(const CudaDriver& driver) {
  driver_ = &driver;
#ifdef SUPEROFFLOAD_FATBIN_DIRECTORY
  CudaModule pack = nullptr, product = nullptr, resident = nullptr;
  for (const auto& [module, image] : {std::pair(&pack, superoffload_pack_fatbin),
                                      std::pair(&product, superoffload_product_fatbin),
                                      std::pair(&resident, superoffload_resident_fatbin)}) {
    if (CudaStatus status = driver.Status(driver.ModuleLoadData(module, image), "loading the GPU kernels");
        !status.ok()) {
      return status;
    }
    modules_.push_back(*module);
  }
  for (const Algorithm* algorithm : Algorithms()) {
    const char* const name = algorithm->resident_kernel;
    if (CudaStatus status = driver.Status(driver.ModuleGetFunction(&residents_[name], resident, name), name);
        !status.ok()) {
      return status;
    }
  }
#define SUPEROFFLOAD_FIND_PACK_KERNEL(name, from, to)                                                             \
  if (CudaStatus status = driver.Status(driver.ModuleGetFunction(&packs_[Index(DType::from)][Index(DType::to)], pack, #name), #name); \
      !status.ok()) {                                                                                             \
    return status;                                                                                                \
  }
  SUPEROFFLOAD_FOR_EACH_PACK_KERNEL(SUPEROFFLOAD_FIND_PACK_KERNEL)
  return driver.Status(driver.ModuleGetFunction(&product_, product, "superoffload_product"), "superoffload_product");
#else
  constexpr int kUnimplemented = 12;
  return {kUnimplemented, "this was built without GPU kernels; build it where nvcc is"};
#endif
}

void CudaKernels::Unload() {
  for (const CudaModule module : modules_) driver_->ModuleUnload(module);
  modules_.clear();
}

template <typename Arguments>
CudaStatus CudaKernels::Launch(CudaFunction function, const char* name, uint64_t blocks, unsigned threads,
                               const Arguments& arguments, CudaStream stream) const {
  void* pointers[] = {const_cast<Arguments*>(&arguments)};
  return driver_->Status(
      driver_->LaunchKernel(function, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, 0, stream, pointers, nullptr),
      name);
}

CudaStatus CudaKernels::Pack(const PackArguments& arguments, CudaStream stream) const {
  const uint64_t chunks = (arguments.elements + kChunkElements - 1) / kChunkElements;
  return Launch(packs_[Index(arguments.dtype)][Index(arguments.slot.dtype)], "packing gradients", chunks, kPackThreads, arguments, stream);
}

CudaStatus CudaKernels::Product(const ProductArguments& arguments, CudaStream stream) const {
  SUPEROFFLOAD_CHECK_EQ(arguments.n % kProductTile, 0u);
  const uint64_t tiles = arguments.n / kProductTile;
  return Launch(product_, "multiplying matrices", tiles * tiles, kProductTile * kProductTile, arguments, stream);
}

CudaStatus CudaKernels::Resident(const Algorithm& algorithm, const ResidentArguments& arguments,
                                 CudaStream stream) const {
  const uint64_t blocks = (arguments.elements + kResidentThreads - 1) / kResidentThreads;
  return Launch(residents_.at(algorithm.resident_kernel), "updating a resident bucket", std::min(blocks, kMaxStridingBlocks), kResidentThreads,
                arguments, stream);
}

}  // namespace superoffload::kernels
