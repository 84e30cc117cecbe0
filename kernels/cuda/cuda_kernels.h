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

// Of the context that is current when it is loaded. Launches are asynchronous; pointers in their arguments are the
// device's.
class CudaKernels {
 public:
  // UNIMPLEMENTED: built without nvcc. FAILED_PRECONDITION: the GPU is too old for them.
  CudaStatus Load(const CudaDriver& driver);

  // Once every launch has ended, with that context current.
  void Unload();

  CudaStatus Pack(const PackArguments& arguments, CudaStream stream) const;
  CudaStatus Product(const ProductArguments& arguments, CudaStream stream) const;
  CudaStatus Resident(const Algorithm& algorithm, const ResidentArguments& arguments, CudaStream stream) const;

 private:
  template <typename Arguments>
  CudaStatus Launch(CudaFunction function, const char* name, uint64_t blocks, unsigned threads,
                    const Arguments& arguments, CudaStream stream) const;

  const CudaDriver* driver_ = nullptr;
  std::vector<CudaModule> modules_;
  CudaFunction packs_[3][3] = {};  // by the tensors' dtype, and the slot's
  CudaFunction product_ = nullptr;
  std::map<std::string_view, CudaFunction> residents_;  // by Algorithm::resident_kernel
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_
