// Which machine the fake libcuda.so finds itself on, and what goes wrong there. Read from the environment whenever it
// matters, so that a test can change its mind; a daemon keeps what it was started with.
//
//   FAKE_CUDA_MACHINE  h100-pcie (default), gh200, hmm (a smaller GPU, which can reach
//                     pageable memory, by faults), mig (a small slice)
//   FAKE_CUDA_UUID     first bytes of the GPUs' UUIDs, "7,3" for two of them; 0 is the default and the only one
//   FAKE_CUDA_DELAY    microseconds by which each piece of a stream's work is delayed at most, at random
//   FAKE_CUDA_SLOW     "HtoD=2000": each copy in this direction (or DtoH) takes so many microseconds longer
//   FAKE_CUDA_FAIL     "cuMemAlloc_v2=2,cuMemCreate=801": these calls end with these CUresults
//   FAKE_CUDA_OOM      5: the fifth allocation after this was set finds no memory, on the GPU or pinned; the next one
//   does FAKE_CUDA_CONTEXT_MIB    what a context takes of the GPU's memory; the machine's, unless set
//   FAKE_CUDA_REGISTER_COST  bytes of it that a page of registered host memory takes; the machine's, unless set
//   FAKE_CUDA_REFUSE_PAGEABLE  1: a copy that would wait, because its host memory is not registered, fails instead
//   FAKE_CUDA_OUTLIVES  milliseconds by which the end of a killed process is late, in which its copies to the host land
//   FAKE_CUDA_NO_PEERS  1: the GPUs cannot reach each other's memory
//   FAKE_CUDA_HOST_IS_GPU      1: memory of this process stands for GPU memory of a framework, and kernels may use it
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_SETTINGS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_SETTINGS_H_

#include <cstddef>
#include <cstdint>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {

Machine ThisMachine();

using Graph = struct GraphTag*;  // CUgraph

int Setting(const char* variable, int unless_set = 0);

// The number that a variable of the form "key=1,other=2" has for the key, or 0.
int SettingOf(const char* variable, const char* key);

// Counts an allocation; whether it is the one that finds no memory.
bool OutOfMemory();

// Waits while calls of this name are stalled (fakeCudaStall).
void AwaitRelease(const char* call);

}  // namespace superoffload::fake_cuda

// For tests, which find them with dlsym.
extern "C" {
// From now on calls of this name wait, until it is called with null.
void fakeCudaStall(const char* call);
// Waits until some thread is in a stalled call.
void fakeCudaAwaitStalled();
// Is told of each copy to the GPU as it is issued; null: nobody is.
typedef void (*fakeCudaCopyHook)(uint64_t device_pointer, size_t bytes);
void fakeCudaOnCopyToGpu(fakeCudaCopyHook hook);
// Is told of each kernel as it is launched, with the shared memory that the launch asks for; null: nobody is.
typedef void (*fakeCudaLaunchHook)(const char* kernel, unsigned blocks, unsigned shared_bytes);
void fakeCudaOnLaunch(fakeCudaLaunchHook hook);
// How many allocations, registrations, streams, events, modules and contexts there are.
int fakeCudaObjects();
// How many copies have waited so far, because their host memory was not registered.
int fakeCudaPageableCopies();
// Where the host finds the memory of a device pointer.
uint64_t fakeCudaAlias(uint64_t pointer);
// Bytes of this process's GPU memory, now and at most since the last reset.
size_t fakeCudaUsedBytes();
size_t fakeCudaPeakBytes();
void fakeCudaResetPeak();
// How many GPUs may use the memory.
int fakeCudaAccessors(uint64_t pointer);
}

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_SETTINGS_H_
