// The CUDA driver, loaded at run time: nothing links libcuda, and without a GPU nothing is missed.
//
// Only what is used is declared here, as the driver's ABI has it, so that no toolkit is needed to build. No exceptions,
// no abseil: trainers' processes load this, too.
#ifndef SUPEROFFLOAD_KERNELS_GPU_CUDA_DRIVER_H_
#define SUPEROFFLOAD_KERNELS_GPU_CUDA_DRIVER_H_

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

// As cuda.h has them; tests/unit/kernels/gpu/cuda_abi_test.cc compares where there is a toolkit.
struct CudaUuid {
  char bytes[16];
  bool operator==(const CudaUuid&) const = default;
};
using CudaAllocation = unsigned long long;  // CUmemGenericAllocationHandle
struct CudaLocation {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int id = 0;
};
struct CudaAllocationProperties {
  int type = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
  CudaLocation location;
  void* win32_metadata = nullptr;
  unsigned char flags[8] = {};
};
struct CudaAccess {
  CudaLocation location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

inline constexpr int kCudaInvalidValue = 1;        // CUDA_ERROR_INVALID_VALUE
inline constexpr int kCudaNotReady = 600;          // CUDA_ERROR_NOT_READY
inline constexpr int kCudaStreamNotCapturing = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kCudaCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kCudaPosixDescriptor = 1;     // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventBlockingSync = 1, kCudaEventDisableTiming = 2;
inline constexpr unsigned kCudaHostAllocPortable = 1;
inline constexpr unsigned kCudaHostRegisterPortable = 1, kCudaHostRegisterDeviceMap = 2;
// CUdevice_attribute. The first: kernels can use pageable host memory, if need be by faults and migration (HMM). The
// second: they use the host's page tables, as on Grace; only that is coherence.
inline constexpr int kCudaPageableMemoryAccess = 88, kCudaHostPageTables = 100, kCudaVmmSupported = 102,
                     kCudaVmmDescriptorSupported = 103, kCudaHostNumaId = 134;
// The multiprocessors' highest clock; the shared memory of a block, for kernels that ask for more than 48 KiB.
inline constexpr int kCudaClockKhz = 13, kCudaMostSharedBytesPerBlock = 97;
inline constexpr int kCudaFunctionDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// A canonical status code (0: OK) and a sentence.
struct CudaStatus {
  static constexpr int kResourceExhausted = 8;

  int code = 0;
  std::string message;
  bool ok() const { return code == 0; }
};

// The driver's functions; each returns 0 or a CUresult.
struct CudaDriver {
  int (*Init)(unsigned flags);
  int (*DeviceGetCount)(int* count);
  int (*DeviceGet)(CudaDevice* device, int ordinal);
  int (*DeviceGetName)(char* name, int bytes, CudaDevice device);
  int (*DeviceGetAttribute)(int* value, int attribute, CudaDevice device);
  int (*DeviceGetUuid)(CudaUuid* uuid, CudaDevice device);
  int (*DeviceCanAccessPeer)(int* can, CudaDevice device, CudaDevice peer);
  int (*DevicePrimaryCtxGetState)(CudaDevice device, unsigned* flags, int* active);
  int (*DevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  int (*DevicePrimaryCtxRelease)(CudaDevice device);
  int (*CtxSetCurrent)(CudaContext context);
  int (*CtxPushCurrent)(CudaContext context);
  int (*CtxPopCurrent)(CudaContext* context);
  int (*ModuleLoadData)(CudaModule* module, const void* image);
  int (*ModuleUnload)(CudaModule module);
  int (*ModuleGetFunction)(CudaFunction* function, CudaModule module, const char* name);
  int (*FuncSetAttribute)(CudaFunction function, int attribute, int value);
  int (*LaunchKernel)(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream, void** arguments,
                      void** extra);
  int (*MemAlloc)(CudaPointer* pointer, size_t bytes);
  int (*MemFree)(CudaPointer pointer);
  int (*MemGetInfo)(size_t* free_bytes, size_t* total_bytes);
  int (*MemGetAllocationGranularity)(size_t* bytes, const CudaAllocationProperties* properties, int option);
  int (*MemCreate)(CudaAllocation* allocation, size_t bytes, const CudaAllocationProperties* properties,
                   unsigned long long flags);
  int (*MemRelease)(CudaAllocation allocation);
  int (*MemExportToShareableHandle)(void* handle, CudaAllocation allocation, int type, unsigned long long flags);
  int (*MemImportFromShareableHandle)(CudaAllocation* allocation, void* handle, int type);
  int (*MemAddressReserve)(CudaPointer* pointer, size_t bytes, size_t alignment, CudaPointer at,
                           unsigned long long flags);
  int (*MemAddressFree)(CudaPointer pointer, size_t bytes);
  int (*MemMap)(CudaPointer pointer, size_t bytes, size_t offset, CudaAllocation allocation, unsigned long long flags);
  int (*MemUnmap)(CudaPointer pointer, size_t bytes);
  int (*MemSetAccess)(CudaPointer pointer, size_t bytes, const CudaAccess* access, size_t count);
  int (*MemHostAlloc)(void** data, size_t bytes, unsigned flags);
  int (*MemFreeHost)(void* data);
  int (*MemHostRegister)(void* data, size_t bytes, unsigned flags);
  int (*MemHostUnregister)(void* data);
  int (*MemcpyHtoDAsync)(CudaPointer to, const void* from, size_t bytes, CudaStream stream);
  int (*MemcpyDtoHAsync)(void* to, CudaPointer from, size_t bytes, CudaStream stream);
  int (*MemcpyDtoDAsync)(CudaPointer to, CudaPointer from, size_t bytes, CudaStream stream);
  int (*StreamCreate)(CudaStream* stream, unsigned flags);
  int (*StreamDestroy)(CudaStream stream);
  int (*StreamSynchronize)(CudaStream stream);
  int (*StreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  int (*StreamIsCapturing)(CudaStream stream, int* status);
  int (*ThreadExchangeStreamCaptureMode)(int* mode);
  int (*EventCreate)(CudaEvent* event, unsigned flags);
  int (*EventDestroy)(CudaEvent event);
  int (*EventRecord)(CudaEvent event, CudaStream stream);
  int (*EventQuery)(CudaEvent event);
  int (*EventSynchronize)(CudaEvent event);
  int (*EventElapsedTime)(float* milliseconds, CudaEvent begin, CudaEvent end);
  int (*GetErrorString)(int result, const char** text);

  // The process's one, initialized; null with a status (UNAVAILABLE) when there is no driver or no GPU.
  static const CudaDriver* Load(CudaStatus* status);

  // What a failed call means, and what to do. `call` is what was tried, in words.
  CudaStatus Status(int result, const std::string& call) const;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_CUDA_DRIVER_H_
