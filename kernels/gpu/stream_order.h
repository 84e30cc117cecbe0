// In which order units are read: what followed the last time is what is expected to follow.
#ifndef SUPEROFFLOAD_KERNELS_GPU_STREAM_ORDER_H_
#define SUPEROFFLOAD_KERNELS_GPU_STREAM_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace superoffload::kernels {

// Not thread-safe. Units are indices. A forward pass and its backward pass read a unit twice in a row, or four times
// where it is recomputed: that is one use.
class StreamOrder {
 public:
  explicit StreamOrder(uint32_t units) : units_(units) {}

  void Use(uint32_t unit);

  // The next uses, of any unit but the present one for the first of them. What nobody has seen yet goes on to the next
  // unit, or to the one before, and turns at the ends, as forward and backward passes do.
  std::vector<uint32_t> Expect(size_t uses) const;

 private:
  uint32_t After(uint32_t before, uint32_t unit) const;

  const uint32_t units_;
  std::optional<uint32_t> present_;
  uint32_t before_ = 0;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> followed_;  // two uses in a row -> the next
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_GPU_STREAM_ORDER_H_
