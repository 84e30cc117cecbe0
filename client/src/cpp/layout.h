// The layout of an attach response as superoffload.h takes it.
#ifndef SUPEROFFLOAD_CLIENT_SRC_CPP_LAYOUT_H_
#define SUPEROFFLOAD_CLIENT_SRC_CPP_LAYOUT_H_

#include <vector>

#include "superoffload/client.hpp"

namespace superoffload {

inline std::vector<superoffload_bucket> ToC(const v1::Layout& layout) {
  std::vector<superoffload_bucket> buckets;
  for (const v1::Bucket& bucket : layout.buckets()) {
    buckets.push_back({.elements = bucket.elements(),
                       .parameters_offset = bucket.parameters_offset(),
                       .gpu_offset = bucket.parameters_offset(),
                       .gradient_offsets = {bucket.gradient_offsets(0), bucket.gradient_offsets(1)},
                       .state_offset = bucket.state_offset(),
                       .dtype = static_cast<uint32_t>(bucket.dtype()),
                       .gradient_dtype = static_cast<uint32_t>(bucket.gradient_dtype()),
                       .group = bucket.group(),
                       .reserved = 0});
  }
  return buckets;
}

}  // namespace superoffload

#endif  // SUPEROFFLOAD_CLIENT_SRC_CPP_LAYOUT_H_
