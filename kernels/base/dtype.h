// Element types of gradients, published parameters and optimizer state.
#ifndef SUPEROFFLOAD_KERNELS_BASE_DTYPE_H_
#define SUPEROFFLOAD_KERNELS_BASE_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace superoffload::kernels {

// kUInt8: codes of a state array, which only its algorithm can read. No gradient and no parameter is of it.
enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32, kUInt8 };

constexpr size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kUInt8:
      break;
  }
  return 1;
}

// Whether it holds numbers that every kernel knows, as gradients and parameters do.
constexpr bool IsFloat(DType dtype) { return dtype != DType::kUInt8; }

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_BASE_DTYPE_H_
