// Addresses of device memory, which is in files that other processes can map.
//
// A device pointer lies in a reserved range that no access of the host is allowed to: it faults, as it does on a GPU
// that is not coherent. Work of the GPU uses the same memory at its alias, a fixed distance away.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_ADDRESSES_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_ADDRESSES_H_

#include <cstddef>
#include <cstdint>

namespace superoffload::fake_cuda {

// Whole blocks are taken.
size_t RangeBytes(size_t bytes);
// Thread-safe. Addresses are not used again soon, so that who uses freed memory is noticed. 0: there are none.
uint64_t TakeAddresses(size_t bytes);
// What was taken is given back as a whole.
void GiveAddressesBack(uint64_t begin);

uint64_t AliasOf(uint64_t pointer);
bool IsAddress(uint64_t pointer);

}  // namespace superoffload::fake_cuda

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_FAKE_CUDA_ADDRESSES_H_
