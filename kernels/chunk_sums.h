// How a bucket's sum of squares comes of those of its chunks: in their order, on every path, so that the bits agree.
#ifndef SUPEROFFLOAD_KERNELS_CHUNK_SUMS_H_
#define SUPEROFFLOAD_KERNELS_CHUNK_SUMS_H_

#include <span>

namespace superoffload::kernels {

inline double SumOfChunks(std::span<const double> chunk_sums) {
  double sum = 0;
  for (const double chunk : chunk_sums) sum += chunk;
  return sum;
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CHUNK_SUMS_H_
