#include "kernels/cuda/cuda_driver.h"

#include <dlfcn.h>

namespace superoffload::kernels {
namespace {

// Canonical codes, as absl::StatusCode and superoffload.h number them.
constexpr int kResourceExhausted = 8, kFailedPrecondition = 9, kInternal = 13, kUnavailable = 14, kDataLoss = 15;

// A captured step would not be handed over when its graph is replayed.
constexpr char kCapture[] =
    "a CUDA graph is being captured; capture nothing while a step is handed over, ended or awaited";

// CUresults that users can do something about.
struct Known {
  int result, code;
  const char* remedy;
};
constexpr Known kKnown[] = {
    {2, kResourceExhausted, "free GPU memory, or lower the number of gradient slots and resident buckets"},
    {3, kUnavailable, "the driver is not initialized; check that the NVIDIA kernel modules are loaded"},
    {100, kUnavailable, "no GPU is visible; check CUDA_VISIBLE_DEVICES and the container's devices"},
    {46, kUnavailable, "the GPU is used by another process exclusively or is a MIG parent; use an instance, or end it"},
    {101, kFailedPrecondition, "the GPU does not exist; GPUs are numbered after CUDA_VISIBLE_DEVICES"},
    {201, kFailedPrecondition,
     "the context is gone or of another PID namespace; share the host's (hostPID, --pid=host)"},
    {209, kFailedPrecondition, "the GPU is older than the kernels were built for (compute capability 9.0)"},
    {214, kDataLoss, "the GPU's memory has an uncorrectable error; take it out of service"},
    {208, kFailedPrecondition, "the memory is mapped already; map it once per process"},
    {217, kFailedPrecondition, "the GPUs cannot reach each other's memory; use the same GPU on both sides"},
    {220, kFailedPrecondition, "the GPU's NVLink has an uncorrectable error; take it out of service"},
    {304, kUnavailable, "the operating system refused; see dmesg"},
    {700, kDataLoss, "a kernel of this process used memory that is not there; start the process again"},
    {701, kResourceExhausted, "the GPU cannot run so many threads; report this"},
    {719, kDataLoss, "a kernel of this process failed; see the errors before, and start the process again"},
    {801, kFailedPrecondition, "this driver or container does not allow it"},
    {802, kUnavailable, "the system is not ready; wait for the fabric manager"},
    {803, kUnavailable, "the driver is older than the CUDA library; update it"},
    {900, kFailedPrecondition, kCapture},
    {901, kFailedPrecondition, kCapture},
    {906, kFailedPrecondition, kCapture},
    {907, kFailedPrecondition, kCapture},
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

bool FindAll(void* library, CudaDriver* d) {
  return Find(library, "cuInit", &d->Init) && Find(library, "cuDriverGetVersion", &d->DriverGetVersion) &&
         Find(library, "cuDeviceGetCount", &d->DeviceGetCount) && Find(library, "cuDeviceGet", &d->DeviceGet) &&
         Find(library, "cuDeviceGetName", &d->DeviceGetName) &&
         Find(library, "cuDeviceGetAttribute", &d->DeviceGetAttribute) &&
         Find(library, "cuDeviceGetUuid_v2", &d->DeviceGetUuid) &&
         Find(library, "cuDevicePrimaryCtxRetain", &d->DevicePrimaryCtxRetain) &&
         Find(library, "cuDevicePrimaryCtxRelease_v2", &d->DevicePrimaryCtxRelease) &&
         Find(library, "cuCtxSetCurrent", &d->CtxSetCurrent) &&
         Find(library, "cuCtxPushCurrent_v2", &d->CtxPushCurrent) &&
         Find(library, "cuCtxPopCurrent_v2", &d->CtxPopCurrent) &&
         Find(library, "cuModuleLoadData", &d->ModuleLoadData) && Find(library, "cuModuleUnload", &d->ModuleUnload) &&
         Find(library, "cuModuleGetFunction", &d->ModuleGetFunction) &&
         Find(library, "cuLaunchKernel", &d->LaunchKernel) && Find(library, "cuMemAlloc_v2", &d->MemAlloc) &&
         Find(library, "cuMemFree_v2", &d->MemFree) && Find(library, "cuMemGetInfo_v2", &d->MemGetInfo) &&
         Find(library, "cuMemGetAddressRange_v2", &d->MemGetAddressRange) &&
         Find(library, "cuIpcGetMemHandle", &d->IpcGetMemHandle) &&
         Find(library, "cuIpcOpenMemHandle_v2", &d->IpcOpenMemHandle) &&
         Find(library, "cuIpcCloseMemHandle", &d->IpcCloseMemHandle) &&
         Find(library, "cuMemGetAllocationGranularity", &d->MemGetAllocationGranularity) &&
         Find(library, "cuMemCreate", &d->MemCreate) && Find(library, "cuMemRelease", &d->MemRelease) &&
         Find(library, "cuMemExportToShareableHandle", &d->MemExportToShareableHandle) &&
         Find(library, "cuMemImportFromShareableHandle", &d->MemImportFromShareableHandle) &&
         Find(library, "cuMemAddressReserve", &d->MemAddressReserve) &&
         Find(library, "cuMemAddressFree", &d->MemAddressFree) && Find(library, "cuMemMap", &d->MemMap) &&
         Find(library, "cuMemUnmap", &d->MemUnmap) && Find(library, "cuMemSetAccess", &d->MemSetAccess) &&
         Find(library, "cuMemHostAlloc", &d->MemHostAlloc) && Find(library, "cuMemFreeHost", &d->MemFreeHost) &&
         Find(library, "cuMemHostRegister_v2", &d->MemHostRegister) &&
         Find(library, "cuMemHostUnregister", &d->MemHostUnregister) &&
         Find(library, "cuMemcpyHtoDAsync_v2", &d->MemcpyHtoDAsync) &&
         Find(library, "cuMemcpyDtoHAsync_v2", &d->MemcpyDtoHAsync) &&
         Find(library, "cuMemcpyDtoDAsync_v2", &d->MemcpyDtoDAsync) &&
         Find(library, "cuStreamCreate", &d->StreamCreate) && Find(library, "cuStreamDestroy_v2", &d->StreamDestroy) &&
         Find(library, "cuStreamSynchronize", &d->StreamSynchronize) &&
         Find(library, "cuStreamWaitEvent", &d->StreamWaitEvent) &&
         Find(library, "cuStreamIsCapturing", &d->StreamIsCapturing) &&
         Find(library, "cuEventCreate", &d->EventCreate) &&
         Find(library, "cuEventDestroy_v2", &d->EventDestroy) && Find(library, "cuEventRecord", &d->EventRecord) &&
         Find(library, "cuEventSynchronize", &d->EventSynchronize) &&
         Find(library, "cuEventElapsedTime", &d->EventElapsedTime) &&
         Find(library, "cuGetErrorString", &d->GetErrorString);
}

struct Loaded {
  CudaDriver driver{};
  CudaStatus status;
};

Loaded LoadOnce() {
  Loaded loaded;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.status = {kUnavailable, "there is no NVIDIA driver (libcuda.so.1); install it, or use host memory"};
  } else if (!FindAll(library, &loaded.driver)) {
    loaded.status = {kUnavailable, "the NVIDIA driver lacks functions of CUDA 12; update it"};
  } else {
    loaded.status = loaded.driver.Status(loaded.driver.Init(0), "initializing the NVIDIA driver");
  }
  return loaded;
}

}  // namespace

const CudaDriver* CudaDriver::Load(CudaStatus* status) {
  static const Loaded loaded = LoadOnce();
  *status = loaded.status;
  return loaded.status.ok() ? &loaded.driver : nullptr;
}

CudaStatus CudaDriver::Status(int result, const std::string& call) const {
  if (result == 0) return {};
  const char* text = nullptr;
  if (GetErrorString(result, &text) != 0 || text == nullptr) text = "unknown error";
  const std::string what = call + ": " + text + " (CUDA error " + std::to_string(result) + ")";
  for (const Known& known : kKnown) {
    if (known.result == result) return {known.code, what + "; " + known.remedy};
  }
  return {kInternal, what};
}

}  // namespace superoffload::kernels
