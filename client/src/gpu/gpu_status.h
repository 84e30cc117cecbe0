// Errors of the driver as the client's.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_STATUS_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_STATUS_H_

#include "client/src/status.h"
#include "kernels/gpu/cuda_driver.h"

namespace superoffload::client {

inline Status FromCuda(const kernels::CudaStatus& status) { return {static_cast<Code>(status.code), status.message}; }

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_GPU_STATUS_H_
