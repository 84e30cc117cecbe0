// Launches the GPU kernels of this folder.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_
#define SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_

#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/cuda/kernels.cuh"
#include "kernels/gpu/cuda_driver.h"

namespace superoffload::kernels {

// Fills in `begins` of PackTable::chunk_begins, one more than the bucket has chunks.
void IndexChunks(std::span<const PackedTensor> tensors, uint64_t elements, uint32_t* begins);

// How many blocks pack a bucket at the pace of twice the copy down, and no more: each takes room from the trainer's
// kernels. `clock_hz`: the multiprocessors'; where it is 0, it is unknown, and there is no bound.
uint64_t PackBlocks(double link_bytes_per_second, double clock_hz, DType slot);

// Of the context that is current when it is loaded. Launches are asynchronous; pointers in their arguments are the
// device's.
class CudaKernels {
 public:
  // UNIMPLEMENTED: built without nvcc. FAILED_PRECONDITION: the GPU is too old for them.
  CudaStatus Load(const CudaDriver& driver, CudaDevice device);

  // Once every launch has ended, with that context current.
  void Unload();

  CudaStatus Pack(const PackArguments& arguments, CudaStream stream) const;
  CudaStatus Product(const ProductArguments& arguments, CudaStream stream) const;
  CudaStatus Resident(const Algorithm& algorithm, const ResidentArguments& arguments, CudaStream stream) const;

 private:
  CudaStatus FindFunctions();
  void ReadDevice(CudaDevice device);
  template <typename Arguments>
  CudaStatus Launch(CudaFunction function, const char* name, uint64_t blocks, unsigned threads, unsigned shared_bytes,
                    const Arguments& arguments, CudaStream stream) const;

  const CudaDriver* driver_ = nullptr;
  std::vector<CudaModule> modules_;
  CudaFunction packs_[3][3] = {};      // by the tensors' dtype, and the slot's
  uint64_t most_pack_blocks_[3] = {};  // by the slot's dtype
  CudaFunction product_ = nullptr;
  unsigned product_dynamic_bytes_ = 0;                  // of shared memory
  std::map<std::string_view, CudaFunction> residents_;  // by Algorithm::resident_kernel
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_
