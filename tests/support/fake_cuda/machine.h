// Which machine the fake driver's GPUs are in, and what goes wrong there. The fake libcuda.so reads it from the
// environment whenever it matters, so that a test can change its mind; a daemon keeps what it was started with.
//
//   FAKE_CUDA_MACHINE  h100-pcie (default), gh200, hmm (a smaller GPU, which can reach
//                     pageable memory, by faults), mig (a small slice)
//   FAKE_CUDA_UUID     first bytes of the GPUs' UUIDs, "7,3" for two of them; 0 is the default and the only one
//   FAKE_CUDA_DELAY    microseconds by which each piece of a stream's work is delayed at most, at random
//   FAKE_CUDA_SLOW     "HtoD=2000": each copy in this direction (or DtoH) takes so many microseconds longer
//   FAKE_CUDA_FAIL     "cuMemAlloc_v2=2,cuMemCreate=801": these calls end with these CUresults
//   FAKE_CUDA_OOM      5: the fifth allocation after this was set finds no memory, on the GPU or pinned; the next one
//                     does
//   FAKE_CUDA_CONTEXT_MIB    what a context takes of the GPU's memory; the machine's, unless set
//   FAKE_CUDA_REGISTER_COST  bytes of it that a page of registered host memory takes; the machine's, unless set
//   FAKE_CUDA_REFUSE_PAGEABLE  1: a copy that would wait, because its host memory is not registered, fails instead
//   FAKE_CUDA_OUTLIVES  milliseconds by which the end of a killed process is late, in which its copies to the host land
//   FAKE_CUDA_NO_PEERS  1: the GPUs cannot reach each other's memory
//   FAKE_CUDA_HOST_IS_GPU      1: memory of this process stands for GPU memory of a framework, and kernels may use it
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MACHINE_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MACHINE_H_

#include <cstddef>
#include <string_view>
#include <vector>

#include "server/simulator/driver/driver.h"

namespace superoffload::fake_cuda {

using namespace simulator::cuda_results;

struct Machine {
  const char* name;       // of the GPU
  bool pageable_access;   // attribute 88: kernels can use pageable host memory
  bool host_page_tables;  // attribute 100: and nobody copies or faults for it
  size_t memory_bytes;
  unsigned shared_bytes;  // attribute 97: of a block, at most
  size_t context_bytes;   // of its memory, for a process that uses it
  size_t register_cost;   // bytes of its memory for a page of registered host memory: an entry of its page tables
  bool peers = true, refuses_pageable = false, host_is_gpu = false;
  std::vector<int> uuids = {0};
};

// By the name that FAKE_CUDA_MACHINE has for it; ends the process where there is none.
const Machine& FindMachine(std::string_view name);
Machine ThisMachine();

using Graph = struct GraphTag*;  // CUgraph

int Setting(const char* variable, int unless_set = 0);

// The number that a variable of the form "key=1,other=2" has for the key, or 0.
int SettingOf(const char* variable, const char* key);

// Counts an allocation; whether it is the one that finds no memory.
bool OutOfMemory();

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MACHINE_H_
