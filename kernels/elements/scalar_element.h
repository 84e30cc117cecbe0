// One element of a run-time dtype, on the host and on the GPU.
#ifndef SUPEROFFLOAD_KERNELS_ELEMENTS_SCALAR_ELEMENT_H_
#define SUPEROFFLOAD_KERNELS_ELEMENTS_SCALAR_ELEMENT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/elements/elements.h"
#include "kernels/float_conversion.h"
#include "kernels/host_device.h"

namespace superoffload::kernels {

SUPEROFFLOAD_HOST_DEVICE inline float LoadElement(ConstElements elements, size_t i) {
  switch (elements.dtype) {
    case DType::kBFloat16:
      return WidenBFloat16(static_cast<const uint16_t*>(elements.data)[i]);
    case DType::kFloat16:
      return WidenFloat16(static_cast<const uint16_t*>(elements.data)[i]);
    case DType::kFloat32:
    case DType::kUInt8:
      break;
  }
  return static_cast<const float*>(elements.data)[i];
}

SUPEROFFLOAD_HOST_DEVICE inline void StoreElement(MutableElements elements, size_t i, float value) {
  switch (elements.dtype) {
    case DType::kBFloat16:
      static_cast<uint16_t*>(elements.data)[i] = NarrowToBFloat16(value);
      return;
    case DType::kFloat16:
      static_cast<uint16_t*>(elements.data)[i] = NarrowToFloat16(value);
      return;
    case DType::kFloat32:
    case DType::kUInt8:
      break;
  }
  static_cast<float*>(elements.data)[i] = value;
}

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_ELEMENTS_SCALAR_ELEMENT_H_
