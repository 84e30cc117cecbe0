// What cuda_driver.h declares by hand, against the toolkit's header. Compiled only where there is one.
#define __CUDA_API_VERSION_INTERNAL  // every function by the name that the library exports, as the loader asks for it
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "kernels/gpu/cuda_driver.h"
#include "tests/support/fake_cuda/machine.h"

namespace superoffload::kernels {
namespace {

static_assert(sizeof(CudaUuid) == sizeof(CUuuid));
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
static_assert(kCudaCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kCudaPosixDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kCudaStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kCudaEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(kCudaEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCudaHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kCudaHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kCudaHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kCudaPageableMemoryAccess == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
static_assert(kCudaHostPageTables == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
static_assert(kCudaVmmSupported == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kCudaVmmDescriptorSupported == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(kCudaHostNumaId == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
static_assert(kCudaClockKhz == CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
static_assert(kCudaMostSharedBytesPerBlock == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(kCudaFunctionDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

// The toolkit's type of one of ours.
template <typename Ours>
struct Counterpart {
  using Type = void;
};
#define COUNTERPART(ours, theirs) \
  template <>                     \
  struct Counterpart<ours> {      \
    using Type = theirs;          \
  }
COUNTERPART(CudaContextTag, CUctx_st);
COUNTERPART(CudaModuleTag, CUmod_st);
COUNTERPART(CudaFunctionTag, CUfunc_st);
COUNTERPART(CudaStreamTag, CUstream_st);
COUNTERPART(CudaEventTag, CUevent_st);
COUNTERPART(fake_cuda::GraphTag, CUgraph_st);
COUNTERPART(CudaUuid, CUuuid);
COUNTERPART(CudaAllocationProperties, CUmemAllocationProp);
COUNTERPART(CudaAccess, CUmemAccessDesc);
#undef COUNTERPART

// Integers of one size and sign, our int for an enumeration, counterparts, and pointers to such.
template <typename Ours, typename Theirs>
constexpr bool Same() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using Our = std::remove_pointer_t<Ours>;
    using Their = std::remove_pointer_t<Theirs>;
    return std::is_const_v<Our> == std::is_const_v<Their> &&
           Same<std::remove_const_t<Our>, std::remove_const_t<Their>>();
  } else if constexpr (std::is_integral_v<Ours> && std::is_integral_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && std::is_signed_v<Ours> == std::is_signed_v<Theirs>;
  } else if constexpr (std::is_enum_v<Theirs>) {
    return std::is_same_v<Ours, int> && sizeof(Ours) == sizeof(Theirs);
  } else {
    return std::is_same_v<Ours, Theirs> || std::is_same_v<typename Counterpart<Ours>::Type, Theirs>;
  }
}
static_assert(Same<CudaStream*, CUstream*>() && !Same<CudaStream, CUevent>() && !Same<CudaPointer, CUstream>());
static_assert(!Same<unsigned, CUmemAllocationHandleType>() && !Same<unsigned, int>() && !Same<void*, const void*>());

template <typename Ours, typename Theirs>
constexpr bool kSameFunction = false;
template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
constexpr bool kSameFunction<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> =
    Same<OurResult, TheirResult>() && (Same<Ours, Theirs>() && ...);
static_assert(kSameFunction<int (*)(CudaEvent, CudaStream), CUresult (*)(CUevent, CUstream)>);
static_assert(!kSameFunction<int (*)(CudaStream, CudaEvent), CUresult (*)(CUevent, CUstream)>);
static_assert(!kSameFunction<int (*)(CudaEvent), CUresult (*)(CUevent, CUstream)>);

// What the product calls, and what the fake driver has beside it; the fake driver compares its own with both lists.
#define CUDA_FUNCTION(symbol, member) \
  static_assert(kSameFunction<decltype(CudaDriver::member), decltype(&symbol)>, #symbol);
#include "kernels/gpu/cuda_functions.inc"
#define CUDA_FUNCTION(symbol, ...) static_assert(kSameFunction<__VA_ARGS__, decltype(&symbol)>, #symbol);
#include "tests/support/fake_cuda/more_functions.inc"

}  // namespace
}  // namespace superoffload::kernels
