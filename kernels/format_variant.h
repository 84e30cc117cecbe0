// An algorithm again, with its state in another format: the same formula and scalars.
#ifndef SUPEROFFLOAD_KERNELS_FORMAT_VARIANT_H_
#define SUPEROFFLOAD_KERNELS_FORMAT_VARIANT_H_

#include <span>
#include <string_view>
#include <vector>

#include "kernels/algorithm.h"
#include "kernels/codes/dynamic_code.h"

namespace superoffload::kernels {

// What belongs to a format of one formula.
struct FormatVariant {
  Format format;
  std::span<const StateArray> arrays;
  const std::vector<const AlgorithmKernels*>& (*supported)();
  const char* resident_kernel;
};

constexpr Algorithm InFormat(const Algorithm& in_fp32, std::string_view name, const FormatVariant& variant) {
  Algorithm algorithm = in_fp32;
  algorithm.name = name;
  algorithm.arrays = variant.arrays;
  algorithm.supported = variant.supported;
  algorithm.resident_kernel = variant.resident_kernel;
  algorithm.in_fp32 = &in_fp32;
  algorithm.rounds_moments = variant.format.moments == Moments::kRoundedBFloat16;
  algorithm.rounds_masters = variant.format.masters == Masters::kRoundedBFloat16;
  algorithm.block_elements = variant.format.moments == Moments::kDynamic8 ? kCodeBlock : 1;
  return algorithm;
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_FORMAT_VARIANT_H_
