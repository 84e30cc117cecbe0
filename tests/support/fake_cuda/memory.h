// The memory that a process has of its fake GPUs, and host memory that it registered with them.
//
// The GPU's is in files that other processes can map. A device pointer lies in a reserved range that no access of the
// host is allowed to: it faults, as it does on a GPU that is not coherent. Work of the GPU uses the same memory at its
// alias, a fixed distance away.
//
// All functions are thread-safe. Those that return a CUresult are the driver's.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "tests/support/fake_cuda/machine.h"

namespace superoffload::fake_cuda {

class Memory {
 public:
  // `machine()`: may become another one. `out_of_memory()`: is asked by each allocation that would fit, of the GPU or
  // pinned.
  Memory(std::function<Machine()> machine, std::function<bool()> out_of_memory);

  // Everything has been given back.
  ~Memory();

  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Machine machine() const { return machine_(); }

  // What the process takes of the GPU's memory: allocations, contexts, and page tables of registered host memory.
  int Allocate(kernels::CudaPointer* pointer, size_t bytes);
  int Free(kernels::CudaPointer pointer);
  int GetInfo(size_t* free_bytes, size_t* total_bytes) const;
  size_t UsedBytes() const;
  size_t PeakBytes() const;  // the most that were used at once, since ResetPeak
  void ResetPeak();

  // The virtual memory API, with its rules: sizes and addresses are whole granules, a mapping is unmapped as it was
  // mapped, addresses are given back when nothing is mapped there, memory is used until neither its handle nor a
  // mapping of it is left, and nobody reaches it before its access was set. An allocation is a descriptor of its file.
  int GetGranularity(size_t* bytes, const kernels::CudaAllocationProperties*, int) const;
  int Create(kernels::CudaAllocation* allocation, size_t bytes, const kernels::CudaAllocationProperties* properties,
             unsigned long long);
  int Import(kernels::CudaAllocation* allocation, void* descriptor, int);
  int Export(void* descriptor, kernels::CudaAllocation allocation, int, unsigned long long) const;
  int Release(kernels::CudaAllocation allocation);
  int Reserve(kernels::CudaPointer* pointer, size_t bytes, size_t, kernels::CudaPointer, unsigned long long);
  int Unreserve(kernels::CudaPointer pointer, size_t bytes);
  int Map(kernels::CudaPointer pointer, size_t bytes, size_t, kernels::CudaAllocation allocation, unsigned long long);
  int SetAccess(kernels::CudaPointer pointer, size_t bytes, const kernels::CudaAccess* accesses, size_t count);
  int Unmap(kernels::CudaPointer pointer, size_t bytes);

  // The GPUs whose access to this memory was opened.
  std::set<int> Accessors(kernels::CudaPointer pointer) const;

  // A context of a GPU, which nobody in this process had.
  int TakeContext(int device);
  void GiveContextBack(int device);

  // Host memory: whole pages that exist, once each. Who registers unregisters, by the same base; who allocates frees.
  int Register(void* data, size_t bytes, unsigned);
  int Unregister(void* data);
  int AllocateHost(void** data, size_t bytes, unsigned);
  int FreeHost(void* data);

  // Copies from and to memory that is all registered are asynchronous. The driver takes none of it in part.
  enum class Pinned { kAll, kNone, kInPart };
  Pinned IsPinned(const void* data, size_t bytes) const;

  // Where the GPU's work finds what a pointer names, in device memory or in host memory that it can use; null: nowhere.
  void* OnGpu(const void* pointer, size_t bytes) const;
  bool IsDevicePointer(kernels::CudaPointer pointer, size_t bytes) const;
  static uint64_t AliasOf(kernels::CudaPointer pointer);  // itself, where it is none of the GPU's

  // Allocations, reservations, mappings and registrations.
  int objects() const;

 private:
  // Physical memory, a handle's and its mappings': used while somebody refers to it. That of another process counts
  // there. Whether it may be exported.
  using PhysicalPtr = std::shared_ptr<const bool>;
  struct Range {
    size_t bytes;
  };
  struct Mapped : Range {
    PhysicalPtr physical;
    std::set<int> accessors;
  };
  struct Host : Range {
    bool allocated;  // by the driver
    PhysicalPtr tables;
  };

  // The one that contains all of it, or end().
  template <typename Ranges>
  static auto Containing(const Ranges& map, uint64_t pointer, size_t bytes) {
    const auto after = map.upper_bound(pointer);
    if (after == map.begin()) return map.end();
    const auto found = std::prev(after);
    const size_t offset = pointer - found->first, size = found->second.bytes;
    return offset <= size && bytes <= size - offset ? found : map.end();
  }
  // Whether some of it is in one of the ranges.
  template <typename Ranges>
  static bool Touches(const Ranges& map, uint64_t pointer, size_t bytes) {
    const auto after = map.lower_bound(pointer + bytes);
    return after != map.begin() && std::prev(after)->first + std::prev(after)->second.bytes > pointer;
  }

  PhysicalPtr MakePhysical(size_t bytes, bool exportable = false);
  uint64_t TakeRange(size_t bytes);
  void GiveRangeBack(uint64_t pointer);
  int MapFile(uint64_t pointer, size_t bytes, int fd, int protection, PhysicalPtr physical);
  int UnmapFile(uint64_t pointer);
  size_t ContextBytes() const;
  bool IsLeft(size_t bytes) const;
  bool Fits(size_t bytes) const;
  bool Covered(uint64_t pointer, size_t bytes) const;
  int RegisterAs(void* data, size_t bytes, bool allocated);
  bool Forget(void* data, bool allocated);

  const std::function<Machine()> machine_;
  const std::function<bool()> out_of_memory_;
  mutable std::mutex mu_;
  size_t used_ = 0, peak_ = 0;
  std::map<uint64_t, Range> ranges_;  // of addresses, taken
  std::map<uint64_t, Mapped> mapped_;
  std::map<uint64_t, PhysicalPtr> created_;  // VMM allocations that this process has handles of
  std::map<uint64_t, Host> registered_;
  std::set<int> contexts_;  // by device
};

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_MEMORY_H_
