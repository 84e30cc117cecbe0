// Which machine the fake driver's GPUs are in.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MACHINE_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MACHINE_H_

#include <cstddef>
#include <string_view>
#include <vector>

#include "server/simulator/driver/results.h"

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
  bool peers = true;      // the GPUs reach each other's memory
  bool refuses_pageable = false;  // a copy that would wait, because its host memory is not registered, fails instead
  bool host_is_gpu = false;  // memory of this process stands for GPU memory of a framework, and kernels may use it
  std::vector<int> uuids = {0};  // first bytes of the GPUs'
};

// h100-pcie, gh200, hmm (a smaller GPU, which can reach pageable memory, by faults), mig (a small slice); null: none of
// these.
const Machine* FindMachine(std::string_view name);

// What every GPU that the fake can be has in common, by number of the attribute; 0: it is none of these.
int LaunchAttribute(int attribute);

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MACHINE_H_
