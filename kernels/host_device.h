// Marks functions that the GPU runs, too.
#ifndef SUPEROFFLOAD_KERNELS_HOST_DEVICE_H_
#define SUPEROFFLOAD_KERNELS_HOST_DEVICE_H_

#ifdef __CUDACC__
#define SUPEROFFLOAD_HOST_DEVICE __host__ __device__
#else
#define SUPEROFFLOAD_HOST_DEVICE
#endif

#endif  // SUPEROFFLOAD_KERNELS_HOST_DEVICE_H_
