// What cuda_driver.h declares by hand, against the toolkit's header. Compiled only where there is one.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "kernels/cuda/cuda_driver.h"

namespace superoffload::kernels {
namespace {

static_assert(sizeof(CudaUuid) == sizeof(CUuuid));
static_assert(sizeof(CudaIpcMemoryHandle) == sizeof(CUipcMemHandle));
static_assert(std::is_same_v<CudaAllocation, CUmemGenericAllocationHandle>);
static_assert(sizeof(CudaPointer) == sizeof(CUdeviceptr));

static_assert(sizeof(CudaAllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(CudaAllocationProperties, handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(CudaAllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(CudaAllocationProperties, win32_metadata) == offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(CudaAllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(CudaAllocationProperties{}.type == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(CudaAllocationProperties{}.handle_types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(CudaAllocationProperties{}.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(sizeof(CudaAccess) == sizeof(CUmemAccessDesc));
static_assert(offsetof(CudaAccess, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(CudaAccess{}.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

static_assert(kCudaInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(kCudaStreamNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kCudaPosixDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kCudaStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kCudaEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(kCudaEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCudaIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(kCudaHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kCudaHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kCudaHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kCudaPageableMemoryAccess == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
static_assert(kCudaHostPageTables == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
static_assert(kCudaVmmSupported == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kCudaVmmDescriptorSupported == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(kCudaHostNumaId == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);

// Functions: as many arguments, each of the same size. (The types differ in name only.)
template <typename Ours, typename Theirs>
struct SameShape : std::false_type {};
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
requires(sizeof...(Ours) == sizeof...(Theirs)) struct SameShape<OurResult (*)(Ours...), TheirResult(Theirs...)>
    : std::bool_constant<sizeof(OurResult) == sizeof(TheirResult) && ((sizeof(Ours) == sizeof(Theirs)) && ...)> {
};

#define SAME_SHAPE(ours, theirs) static_assert(SameShape<decltype(CudaDriver::ours), decltype(theirs)>::value)
SAME_SHAPE(Init, cuInit);
SAME_SHAPE(DriverGetVersion, cuDriverGetVersion);
SAME_SHAPE(DeviceGetCount, cuDeviceGetCount);
SAME_SHAPE(DeviceGet, cuDeviceGet);
SAME_SHAPE(DeviceGetName, cuDeviceGetName);
SAME_SHAPE(DeviceGetAttribute, cuDeviceGetAttribute);
SAME_SHAPE(DeviceGetUuid, cuDeviceGetUuid);
SAME_SHAPE(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
SAME_SHAPE(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease);
SAME_SHAPE(CtxSetCurrent, cuCtxSetCurrent);
SAME_SHAPE(CtxPushCurrent, cuCtxPushCurrent);
SAME_SHAPE(CtxPopCurrent, cuCtxPopCurrent);
SAME_SHAPE(ModuleLoadData, cuModuleLoadData);
SAME_SHAPE(ModuleUnload, cuModuleUnload);
SAME_SHAPE(ModuleGetFunction, cuModuleGetFunction);
SAME_SHAPE(LaunchKernel, cuLaunchKernel);
SAME_SHAPE(MemAlloc, cuMemAlloc);
SAME_SHAPE(MemFree, cuMemFree);
SAME_SHAPE(MemGetInfo, cuMemGetInfo);
SAME_SHAPE(MemGetAddressRange, cuMemGetAddressRange);
SAME_SHAPE(IpcGetMemHandle, cuIpcGetMemHandle);
SAME_SHAPE(IpcOpenMemHandle, cuIpcOpenMemHandle);
SAME_SHAPE(IpcCloseMemHandle, cuIpcCloseMemHandle);
SAME_SHAPE(MemGetAllocationGranularity, cuMemGetAllocationGranularity);
SAME_SHAPE(MemCreate, cuMemCreate);
SAME_SHAPE(MemRelease, cuMemRelease);
SAME_SHAPE(MemExportToShareableHandle, cuMemExportToShareableHandle);
SAME_SHAPE(MemImportFromShareableHandle, cuMemImportFromShareableHandle);
SAME_SHAPE(MemAddressReserve, cuMemAddressReserve);
SAME_SHAPE(MemAddressFree, cuMemAddressFree);
SAME_SHAPE(MemMap, cuMemMap);
SAME_SHAPE(MemUnmap, cuMemUnmap);
SAME_SHAPE(MemSetAccess, cuMemSetAccess);
SAME_SHAPE(MemHostAlloc, cuMemHostAlloc);
SAME_SHAPE(MemFreeHost, cuMemFreeHost);
SAME_SHAPE(MemHostRegister, cuMemHostRegister);
SAME_SHAPE(MemHostUnregister, cuMemHostUnregister);
SAME_SHAPE(MemcpyHtoDAsync, cuMemcpyHtoDAsync);
SAME_SHAPE(MemcpyDtoHAsync, cuMemcpyDtoHAsync);
SAME_SHAPE(MemcpyDtoDAsync, cuMemcpyDtoDAsync);
SAME_SHAPE(StreamCreate, cuStreamCreate);
SAME_SHAPE(StreamDestroy, cuStreamDestroy);
SAME_SHAPE(StreamSynchronize, cuStreamSynchronize);
SAME_SHAPE(StreamWaitEvent, cuStreamWaitEvent);
SAME_SHAPE(StreamIsCapturing, cuStreamIsCapturing);
SAME_SHAPE(EventCreate, cuEventCreate);
SAME_SHAPE(EventDestroy, cuEventDestroy);
SAME_SHAPE(EventRecord, cuEventRecord);
SAME_SHAPE(EventSynchronize, cuEventSynchronize);
SAME_SHAPE(EventElapsedTime, cuEventElapsedTime);
SAME_SHAPE(GetErrorString, cuGetErrorString);

}  // namespace
}  // namespace superoffload::kernels
