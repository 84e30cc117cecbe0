// The fake GPU's memory: files that other processes can map.
//
// A device pointer lies in a reserved range that no access of the host is allowed to: it faults, as it does on a GPU
// that is not coherent. Work of the GPU uses the same memory at its alias, a fixed distance away. VMM ranges have no
// alias before their access was set.
//
// All functions are thread-safe and return a CUresult unless said.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/cuda_driver.h"

namespace superoffload::fake_cuda {

int Allocate(uint64_t* pointer, size_t bytes);
int Free(uint64_t pointer);
int FindAllocation(uint64_t pointer, uint64_t* base, size_t* bytes);
size_t UsedBytes();

// A legacy handle opens the whole allocation, in any process but that which made it.
int ExportLegacy(uint64_t pointer, kernels::CudaIpcMemoryHandle* handle);
int OpenLegacy(const kernels::CudaIpcMemoryHandle& handle, uint64_t* pointer);

// The virtual memory API. An allocation is a descriptor of its file.
int Create(kernels::CudaAllocation* allocation, size_t bytes);
int Import(kernels::CudaAllocation* allocation, int descriptor);
int Export(kernels::CudaAllocation allocation, int* descriptor);
int Release(kernels::CudaAllocation allocation);
int Reserve(uint64_t* pointer, size_t bytes);
int Unreserve(uint64_t pointer);
int Map(uint64_t pointer, size_t bytes, kernels::CudaAllocation allocation);
int SetAccess(uint64_t pointer, size_t bytes);
int Unmap(uint64_t pointer);

// Host memory: whole pages, once each.
int Register(void* data, size_t bytes);
int Unregister(void* data);
int AllocateHost(void** data, size_t bytes);
int FreeHost(void* data);

// Whether copies from and to this memory are asynchronous.
bool IsRegistered(const void* data, size_t bytes);

// Where the GPU's work finds what a pointer names, in device memory or in host memory that it can use; null: nowhere.
void* OnGpu(const void* pointer, size_t bytes);
bool IsDevicePointer(uint64_t pointer, size_t bytes);

}  // namespace superoffload::fake_cuda

// For tests and their adapters: where the host finds the memory of a device pointer.
extern "C" uint64_t fakeCudaAlias(uint64_t pointer);

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_
