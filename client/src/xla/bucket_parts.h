// Which elements of which buckets a piece of a parameter's gradient is.
#ifndef SUPEROFFLOAD_CLIENT_SRC_XLA_BUCKET_PARTS_H_
#define SUPEROFFLOAD_CLIENT_SRC_XLA_BUCKET_PARTS_H_

#include <algorithm>
#include <cstdint>
#include <span>

#include "superoffload/superoffload_xla.h"

namespace superoffload::client {

// Bytes of a DataType of optimizer.proto; 0: it is none.
constexpr uint64_t ElementBytes(uint32_t dtype) { return dtype == 3 ? 4 : dtype == 1 || dtype == 2 ? 2 : 0; }

// Elements [first, first + elements) of a bucket.
struct BucketPart {
  uint32_t bucket = 0;
  uint64_t first = 0;
  uint64_t elements = 0;
};

// Calls `use(part, before)` for each bucket that has some of elements [first, first + elements) of a parameter, with
// how many of them lie before that part.
template <typename Use>
void ForEachPart(const superoffload_xla_parameter& parameter, std::span<const superoffload_bucket> buckets,
                 uint64_t first, uint64_t elements, Use use) {
  const uint64_t bytes = ElementBytes(parameter.dtype);
  const uint64_t begin = parameter.gradient_offsets[0] + first * bytes, end = begin + elements * bytes;
  for (uint32_t bucket = parameter.first_bucket; bucket < parameter.first_bucket + parameter.bucket_count; ++bucket) {
    const uint64_t bucket_begin = buckets[bucket].gradient_offsets[0];
    const uint64_t bucket_end = bucket_begin + buckets[bucket].elements * bytes;
    const uint64_t low = std::max(begin, bucket_begin), high = std::min(end, bucket_end);
    if (low < high) {
      use(BucketPart{bucket, (low - bucket_begin) / bytes, (high - low) / bytes}, (low - begin) / bytes);
    }
  }
}

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_XLA_BUCKET_PARTS_H_
