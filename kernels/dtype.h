// Element types of gradients and published parameters.
#ifndef SUPEROFFLOAD_KERNELS_DTYPE_H_
#define SUPEROFFLOAD_KERNELS_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace superoffload::kernels {

enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_DTYPE_H_
