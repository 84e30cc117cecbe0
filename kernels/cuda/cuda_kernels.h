// Launches the GPU kernels of this folder.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_
#define SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_

#include <vector>

#include "kernels/cuda/cuda_driver.h"
#include "kernels/cuda/kernels.cuh"

namespace superoffload::kernels {

// Of the context that is current when it is loaded. Launches are asynchronous; pointers in their arguments are the
// device's.
class CudaKernels {
 public:
  // UNIMPLEMENTED: built without nvcc. FAILED_PRECONDITION: the GPU is too old for them.
  CudaStatus Load(const CudaDriver& driver);

  // Once every launch has ended, with that context current.
  void Unload();

  CudaStatus Pack(const PackArguments& arguments, CudaStream stream) const;
  CudaStatus ResidentAdam(const ResidentArguments& arguments, CudaStream stream) const;

 private:
  template <typename Arguments>
  CudaStatus Launch(CudaFunction function, const char* name, uint64_t blocks, unsigned threads,
                    const Arguments& arguments, CudaStream stream) const;

  const CudaDriver* driver_ = nullptr;
  std::vector<CudaModule> modules_;
  CudaFunction pack_ = nullptr;
  CudaFunction resident_adam_ = nullptr;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_CUDA_KERNELS_H_
