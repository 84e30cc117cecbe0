#include "kernels/gpu/cuda_driver.h"

#include <dlfcn.h>

namespace superoffload::kernels {
namespace {

// Canonical codes, as absl::StatusCode and superoffload.h number them.
constexpr int kResourceExhausted = CudaStatus::kResourceExhausted, kFailedPrecondition = 9, kInternal = 13,
              kUnavailable = 14, kDataLoss = 15;

// A captured step would not be submitted when its graph is replayed.
constexpr char kCapture[] =
    "a CUDA graph is being captured; capture nothing while a step is submitted, ended or awaited";

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
  bool all = true;
#define CUDA_FUNCTION(symbol, member) all = Find(library, #symbol, &d->member) && all;
#include "kernels/gpu/cuda_functions.inc"
  return all;
}

// Every member is in the list.
#define CUDA_FUNCTION(symbol, member) +1
constexpr size_t kFunctions = 0
#include "kernels/gpu/cuda_functions.inc"
    ;
static_assert(sizeof(CudaDriver) == kFunctions * sizeof(void (*)()));

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
