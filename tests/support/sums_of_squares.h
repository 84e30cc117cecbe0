// The sum of squares of a bucket's gradient, as trainers state it.
#ifndef SUPEROFFLOAD_TESTS_SUPPORT_SUMS_OF_SQUARES_H_
#define SUPEROFFLOAD_TESTS_SUPPORT_SUMS_OF_SQUARES_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/chunk_sums.h"
#include "kernels/elements/elements.h"
#include "server/engine/layout.h"

namespace superoffload::test {

// Of the bucket as it is packed: zeros where there is no gradient. `absent`: by parameter.
inline double SumOfSquares(const engine::Layout& layout, const engine::BucketLayout& bucket, const std::byte* gradient,
                           const std::vector<bool>& absent) {
  const size_t width = kernels::DTypeBytes(bucket.gradient_dtype);
  std::vector<std::byte> packed(gradient, gradient + bucket.elements * width);
  size_t begin = 0;
  for (const engine::Part& part : layout.PartsOf(bucket)) {
    if (absent[part.parameter]) std::memset(packed.data() + begin * width, 0, part.elements * width);
    begin += part.elements;
  }
  std::vector<double> chunks(bucket.chunks());
  for (size_t i = 0; i < chunks.size(); ++i) {
    const size_t first = i * kernels::kChunkElements;
    chunks[i] = kernels::SumOfSquares(std::min<size_t>(kernels::kChunkElements, bucket.elements - first),
                                      {packed.data() + first * width, bucket.gradient_dtype});
  }
  return kernels::SumOfChunks(chunks);
}

}  // namespace superoffload::test

#endif  // SUPEROFFLOAD_TESTS_SUPPORT_SUMS_OF_SQUARES_H_
