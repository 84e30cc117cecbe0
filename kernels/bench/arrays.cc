#include "kernels/bench/arrays.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "kernels/adam/adam.h"

namespace superoffload::kernels {
namespace {

constexpr size_t kHugePageBytes = 2 << 20;

// Array bases that agree in their low bits compete for the same cache sets.
constexpr size_t kStaggerBytes = 704;

size_t RoundUp(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void* TryMap(int fd, size_t bytes, int flags) {
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return MAP_FAILED;
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
}

}  // namespace

Arrays::Arrays(size_t elements, DType gradient_dtype, DType theta_dtype, Team& team)
    : elements_(elements), gradient_dtype_(gradient_dtype), theta_dtype_(theta_dtype) {
  const size_t blocks = elements / kAdamW8Bit.block_elements;
  const size_t sizes[kArrays] = {4 * elements,
                                 4 * elements,
                                 4 * elements,
                                 4 * elements,
                                 DTypeBytes(gradient_dtype) * elements,
                                 DTypeBytes(gradient_dtype) * elements,
                                 DTypeBytes(theta_dtype) * elements,
                                 2 * elements,
                                 2 * elements,
                                 elements,
                                 4 * blocks,
                                 elements,
                                 4 * blocks,
                                 2 * elements};
  for (int i = 0; i < kArrays; ++i) {
    offsets_[i] = bytes_ + i * kStaggerBytes;
    bytes_ = RoundUp(offsets_[i] + sizes[i], kHugePageBytes);
  }
  fd_ = ::memfd_create("adam_bench", MFD_HUGETLB);
  void* mapped = TryMap(fd_, bytes_, MAP_POPULATE);
  pages_ = "huge pages of the pool";
  if (mapped == MAP_FAILED) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = ::memfd_create("adam_bench", 0);
    mapped = TryMap(fd_, bytes_, 0);
    pages_ = "base pages, or huge ones where the kernel gives them to shared memory";
  }
  if (mapped == MAP_FAILED) {
    std::fprintf(stderr, "adam_bench: no memory for %zu bytes; choose fewer --elements\n", bytes_);
    std::exit(1);
  }
  base_ = static_cast<std::byte*>(mapped);
  ::madvise(base_, bytes_, MADV_HUGEPAGE);
  Fill(team);
}

Arrays::~Arrays() {
  ::munmap(base_, bytes_);
  ::close(fd_);
}

void Arrays::Fill(Team& team) {
  team.RunChunks(elements_ / kChunkElements, [this](size_t chunk, int) {
    const size_t first = chunk * kChunkElements;
    const AdamArrays s = state(first);
    float* const gradient_fp32 = peer_gradient(first);
    uint32_t x = static_cast<uint32_t>(2654435761u * (chunk + 1));
    const auto next = [&x] {  // xorshift, in (-1, 1)
      x ^= x << 13;
      x ^= x >> 17;
      x ^= x << 5;
      return static_cast<float>(static_cast<int32_t>(x)) * 0x1p-31f;
    };
    for (size_t i = 0; i < kChunkElements; ++i) {
      s.p[i] = next();
      s.m[i] = 1e-3f * next();
      s.v[i] = 1e-6f * std::fabs(next());
      gradient_fp32[i] = 1e-3f * next();
    }
    for (const ConstElements& elements : {gradient(first), pending(first)}) {
      Narrow(kChunkElements, gradient_fp32, {const_cast<void*>(elements.data), elements.dtype});
    }
    Narrow(kChunkElements, s.p, theta(first));
    Narrow(kChunkElements, s.p, {At<uint16_t>(13, first), DType::kBFloat16});
    Narrow(kChunkElements, s.m, {At<uint16_t>(7, first), DType::kBFloat16});
    Narrow(kChunkElements, s.v, {At<uint16_t>(8, first), DType::kBFloat16});
    const StateView codes = StateOf(kAdamW8Bit, first);
    for (size_t block = 0; block < kChunkElements / kAdamW8Bit.block_elements; ++block) {
      const size_t n = kAdamW8Bit.block_elements, at = block * n;
      for (size_t array = 1; array <= 4; array += 2) {
        kAdamW8Bit.arrays[array].codec->encode(n, (array == 1 ? s.m : s.v) + at,
                                               static_cast<uint8_t*>(codes.arrays[array]) + at,
                                               codes.Floats(array + 1) + block);
      }
    }
  });
}

}  // namespace superoffload::kernels
