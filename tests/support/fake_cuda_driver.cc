// A libcuda.so.1 for machines without a GPU: device memory is the host's, streams are in order and at once, and the GPU
// kernels' sources run on the host. It covers everything up to the driver's calls, and says nothing about a GPU.
// $FAKE_CUDA_FAIL: the CUresult with which allocations end.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels/adam/adam_element.h"
#include "kernels/cuda/kernels.cuh"
#include "tests/unit/kernels/fake_cuda.h"
// After fake_cuda.h.
#include "kernels/cuda/pack.cu"
#include "kernels/cuda/resident.cu"

using superoffload::kernels::PackArguments;
using superoffload::kernels::ResidentArguments;

namespace {

constexpr int kNotFound = 500;
int context, module, stream, event;  // their addresses are handles
const char kPack[] = "superoffload_pack", kResident[] = "superoffload_resident_adam";

template <typename Handle>
int Give(void** handle, Handle& what) {
  *handle = &what;
  return 0;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? 0 : 101; }
int cuDeviceGetName(char* name, int bytes, int) {
  return std::strncpy(name, "fake GPU", static_cast<size_t>(bytes)), 0;
}
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }
int cuDevicePrimaryCtxRetain(void** handle, int) { return Give(handle, context); }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuModuleLoadData(void** handle, const void* image) { return image == nullptr ? 1 : Give(handle, module); }
int cuModuleGetFunction(const void** function, void*, const char* name) {
  for (const char* known : {kPack, kResident}) {
    if (std::strcmp(name, known) == 0) return *function = known, 0;
  }
  return kNotFound;
}
int cuLaunchKernel(const void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                   unsigned, void*, void** arguments, void**) {
  if (function == kPack) {
    LaunchFake(superoffload::kernels::superoffload_pack, grid, block, *static_cast<PackArguments*>(arguments[0]));
  } else {
    LaunchFakeInTurn(superoffload::kernels::superoffload_resident_adam, grid, block,
                     *static_cast<ResidentArguments*>(arguments[0]));
  }
  return 0;
}
int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  if (const char* fail = std::getenv("FAKE_CUDA_FAIL"); fail != nullptr) return std::atoi(fail);
  *pointer = reinterpret_cast<uint64_t>(std::malloc(bytes));
  return *pointer == 0 ? 2 : 0;
}
int cuMemFree_v2(uint64_t pointer) { return std::free(reinterpret_cast<void*>(pointer)), 0; }
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
  return std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes), 0;
}
int cuStreamCreate(void** handle, unsigned) { return Give(handle, stream); }
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return 0; }
int cuEventCreate(void** handle, unsigned) { return Give(handle, event); }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, 0; }
int cuGetErrorString(int result, const char** text) { return *text = result == 2 ? "out of memory" : "an error", 0; }

}  // extern "C"
