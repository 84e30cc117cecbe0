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
#include <vector>

#include "kernels/gpu/cuda_driver.h"

namespace superoffload::fake_cuda {

// What the process takes of the GPU's memory: allocations, contexts, and page tables of registered host memory.
int Allocate(uint64_t* pointer, size_t bytes);
int Free(uint64_t pointer);
size_t UsedBytes();
size_t PeakBytes();  // the most that were used at once, since ResetPeak
void ResetPeak();

// The virtual memory API, with its rules: sizes and addresses are whole granules, a mapping is unmapped as it was
// mapped, addresses are given back when nothing is mapped there, and memory is used until neither its handle nor a
// mapping of it is left. An allocation is a descriptor of its file.
inline constexpr size_t kGranularity = size_t{2} << 20;
int Create(kernels::CudaAllocation* allocation, size_t bytes, bool exportable);
int Import(kernels::CudaAllocation* allocation, int descriptor);
int Export(kernels::CudaAllocation allocation, int* descriptor);
int Release(kernels::CudaAllocation allocation);
int Reserve(uint64_t* pointer, size_t bytes);
int Unreserve(uint64_t pointer, size_t bytes);
int Map(uint64_t pointer, size_t bytes, kernels::CudaAllocation allocation);
int SetAccess(uint64_t pointer, size_t bytes, const std::vector<int>& devices);
int Unmap(uint64_t pointer, size_t bytes);

// The GPUs whose access to this memory was opened.
std::vector<int> Accessors(uint64_t pointer);

// A context of a GPU, which nobody in this process had.
int TakeContext(int device);
void GiveContextBack(int device);

// Host memory: whole pages that exist, once each. Who registers unregisters, by the same base; who allocates frees.
int Register(void* data, size_t bytes);
int Unregister(void* data);
int AllocateHost(void** data, size_t bytes);
int FreeHost(void* data);

// Copies from and to memory that is all registered are asynchronous. The driver takes none of it in part.
enum class Pinned { kAll, kNone, kInPart };
Pinned IsPinned(const void* data, size_t bytes);

// Where the GPU's work finds what a pointer names, in device memory or in host memory that it can use; null: nowhere.
void* OnGpu(const void* pointer, size_t bytes);
bool IsDevicePointer(uint64_t pointer, size_t bytes);

}  // namespace superoffload::fake_cuda

// For tests and their adapters: where the host finds the memory of a device pointer.
extern "C" {
uint64_t fakeCudaAlias(uint64_t pointer);
// Bytes of this process's GPU memory, now and at most since the last reset.
size_t fakeCudaUsedBytes();
size_t fakeCudaPeakBytes();
void fakeCudaResetPeak();
// How many GPUs may use the memory.
int fakeCudaAccessors(uint64_t pointer);
}

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_
