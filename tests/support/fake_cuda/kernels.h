// The GPU kernels' sources, run on the host by a stream's thread, on the memory that a GPU could reach.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_

namespace superoffload::fake_cuda {

// Null: there is no such kernel.
const void* FindKernel(const char* name);
const char* NameOf(const void* kernel);
// As the driver does, which grants more than 48 KiB of shared memory only to a kernel that has asked for it.
int AllowShared(const void* kernel, int dynamic_bytes);
int Launch(const void* kernel, unsigned grid, unsigned block, unsigned dynamic_bytes, void* stream, void** arguments);

// The CUresult with which every call ends once a kernel or a copy touched memory that is not there, or 0.
int Fault();
void SetFault();

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_KERNELS_H_
