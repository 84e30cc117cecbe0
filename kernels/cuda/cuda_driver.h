// The CUDA driver, loaded at run time: nothing links libcuda, and without a GPU nothing is missed.
//
// Only what is used is declared here, as the driver's ABI has it, so that no toolkit is needed to build. No exceptions,
// no abseil: trainers' processes load this, too.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_CUDA_DRIVER_H_
#define SUPEROFFLOAD_KERNELS_CUDA_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace superoffload::kernels {

using CudaDevice = int;
using CudaPointer = uint64_t;
using CudaContext = struct CudaContextTag*;
using CudaModule = struct CudaModuleTag*;
using CudaFunction = struct CudaFunctionTag*;
using CudaStream = struct CudaStreamTag*;
using CudaEvent = struct CudaEventTag*;

// A canonical status code (0: OK) and a sentence.
struct CudaStatus {
  int code = 0;
  std::string message;
  bool ok() const { return code == 0; }
};

// The driver's functions; each returns 0 or a CUresult.
struct CudaDriver {
  int (*Init)(unsigned flags);
  int (*DriverGetVersion)(int* version);
  int (*DeviceGetCount)(int* count);
  int (*DeviceGet)(CudaDevice* device, int ordinal);
  int (*DeviceGetName)(char* name, int bytes, CudaDevice device);
  int (*DeviceGetAttribute)(int* value, int attribute, CudaDevice device);
  int (*DevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  int (*DevicePrimaryCtxRelease)(CudaDevice device);
  int (*CtxSetCurrent)(CudaContext context);
  int (*ModuleLoadData)(CudaModule* module, const void* image);
  int (*ModuleGetFunction)(CudaFunction* function, CudaModule module, const char* name);
  int (*LaunchKernel)(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                      void** extra);
  int (*MemAlloc)(CudaPointer* pointer, size_t bytes);
  int (*MemFree)(CudaPointer pointer);
  int (*MemHostRegister)(void* data, size_t bytes, unsigned flags);
  int (*MemHostUnregister)(void* data);
  int (*MemcpyHtoDAsync)(CudaPointer to, const void* from, size_t bytes, CudaStream stream);
  int (*MemcpyDtoHAsync)(void* to, CudaPointer from, size_t bytes, CudaStream stream);
  int (*MemcpyDtoDAsync)(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream);
  int (*StreamCreate)(CudaStream* stream, unsigned flags);
  int (*StreamDestroy)(CudaStream stream);
  int (*StreamSynchronize)(CudaStream stream);
  int (*EventCreate)(CudaEvent* event, unsigned flags);
  int (*EventDestroy)(CudaEvent event);
  int (*EventRecord)(CudaEvent event, CudaStream stream);
  int (*EventElapsedTime)(float* milliseconds, CudaEvent begin, CudaEvent end);
  int (*GetErrorString)(int result, const char** text);

  // The process's one, initialized; null with a status (UNAVAILABLE) when there is no driver or no GPU.
  static const CudaDriver* Load(CudaStatus* status);

  // What a failed call means, and what to do. `call` is what was tried, in words.
  CudaStatus Status(int result, const std::string& call) const;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_CUDA_DRIVER_H_
