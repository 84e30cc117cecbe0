// Copies that outlive their process, as on a GPU: it goes on copying into host memory until the driver's files are
// closed, which is after a killed process has closed its sockets and before it has ended.
//
//   process    killed, sockets closed ........................................ ended
//   helper     waits FAKE_CUDA_OUTLIVES milliseconds, finishes the copies, lets it end
//
// The helper is a child that traces one thread of the process. That thread has no files, so it keeps no socket open;
// its exit stops until the helper continues it, and so long there is a process with its memory. Where nobody may trace
// (ptrace), a process that asks for this ends.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_OUTLIVE_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_OUTLIVE_H_

#include <cstddef>
#include <memory>

namespace superoffload::fake_cuda {

// A copy to host memory that has begun, while the result lives. Without FAKE_CUDA_OUTLIVES it is nothing.
std::shared_ptr<void> Unfinished(void* to, const void* from, size_t bytes);

}  // namespace superoffload::fake_cuda

// For tests: how many copies would outlive the process now.
extern "C" int fakeCudaUnfinishedCopies();

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_OUTLIVE_H_
