// Masters in the dtype of the parameters are these; others are widened, and narrowed.
#include <algorithm>
#include <cstring>

#include "kernels/elements/elements.h"

namespace superoffload::kernels {
namespace {

constexpr size_t kBlock = 512;  // elements, which stay in L1

void PushToFloats(size_t n, ConstElements theta, float* p) {
  const auto* published = static_cast<const uint16_t*>(theta.data);
  uint16_t narrowed[kBlock];
  float widened[kBlock];
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    Narrow(count, p + begin, {narrowed, theta.dtype});
    if (std::memcmp(narrowed, published + begin, count * sizeof(uint16_t)) == 0) continue;
    Widen(count, {published + begin, theta.dtype}, widened);
    for (size_t i = 0; i < count; ++i) {
      if (narrowed[i] != published[begin + i]) p[begin + i] = widened[i];
    }
  }
}

}  // namespace

void Publish(size_t n, ConstElements masters, MutableElements theta) {
  if (masters.dtype == theta.dtype) {
    std::memcpy(theta.data, masters.data, n * DTypeBytes(theta.dtype));
  } else {
    Narrow(n, static_cast<const float*>(masters.data), theta);
  }
}

void Push(size_t n, ConstElements theta, MutableElements masters) {
  if (masters.dtype == theta.dtype) {
    std::memcpy(masters.data, theta.data, n * DTypeBytes(theta.dtype));
  } else {
    PushToFloats(n, theta, static_cast<float*>(masters.data));
  }
}

}  // namespace superoffload::kernels
