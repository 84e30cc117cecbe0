#include "kernels/cuda/cuda_kernels.h"

#include <algorithm>

#ifdef SUPEROFFLOAD_FATBIN_DIRECTORY
// The compiled kernels, for every architecture they were built for.
asm(".section .rodata\n"
    ".balign 16\n"
    "superoffload_pack_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/pack.fatbin\"\n"
    ".balign 16\n"
    "superoffload_resident_fatbin: .incbin \"" SUPEROFFLOAD_FATBIN_DIRECTORY
    "/resident.fatbin\"\n"
    ".previous\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char superoffload_pack_fatbin[],
    superoffload_resident_fatbin[];
#endif

namespace superoffload::kernels {
namespace {

// Blocks of a kernel that strides: enough to fill any GPU several times over.
constexpr uint64_t kMaxStridingBlocks = 4096;

}  // namespace

CudaStatus CudaKernels::Load(const CudaDriver& driver) {
  driver_ = &driver;
#ifdef SUPEROFFLOAD_FATBIN_DIRECTORY
  struct {
    const void* image;
    const char* name;
    CudaFunction* function;
  } const kernels[] = {{superoffload_pack_fatbin, "superoffload_pack", &pack_},
                       {superoffload_resident_fatbin, "superoffload_resident_adam", &resident_adam_}};
  for (const auto& kernel : kernels) {
    CudaModule module = nullptr;
    if (CudaStatus status = driver.Status(driver.ModuleLoadData(&module, kernel.image), "loading the GPU kernels");
        !status.ok()) {
      return status;
    }
    modules_.push_back(module);
    if (CudaStatus status = driver.Status(driver.ModuleGetFunction(kernel.function, module, kernel.name), kernel.name);
        !status.ok()) {
      return status;
    }
  }
  return {};
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
  return Launch(pack_, "packing gradients", chunks, kPackThreads, arguments, stream);
}

CudaStatus CudaKernels::ResidentAdam(const ResidentArguments& arguments, CudaStream stream) const {
  const uint64_t blocks = (arguments.elements + kResidentThreads - 1) / kResidentThreads;
  return Launch(resident_adam_, "updating a resident bucket", std::min(blocks, kMaxStridingBlocks), kResidentThreads,
                arguments, stream);
}

}  // namespace superoffload::kernels
