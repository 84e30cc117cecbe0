// A box of a tensor: what a rank has of it, or wants. Elements of a box lie row-major, one after the other.
#ifndef SUPEROFFLOAD_SERVER_CHECKPOINT_BOX_H_
#define SUPEROFFLOAD_SERVER_CHECKPOINT_BOX_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"

namespace superoffload::checkpoint {

// A box of a tensor of shape `global_shape`.
struct Box {
  std::vector<uint64_t> global_shape, offset, shape;

  // The whole of a tensor.
  static Box Whole(const std::vector<uint64_t>& shape) {
    return {shape, std::vector<uint64_t>(shape.size(), 0), shape};
  }
  uint64_t Elements() const;
  bool operator==(const Box&) const = default;
};

// Whether the box lies in its tensor, and the tensor's bytes fit 64 bits.
bool Fits(const Box& box);

// Of two boxes of one tensor; none when they have no element in common.
std::optional<Box> Intersection(const Box& a, const Box& b);

// Elements that lie together in two boxes of one tensor: `count` from number `from` of the one and `at` of the other
// on.
struct SharedRun {
  uint64_t from = 0, at = 0, count = 0;
};

// Calls visit for each run that the boxes share, in the order in which they lie, until it returns an error.
absl::Status ForEachSharedRun(const Box& from, const Box& at,
                              const std::function<absl::Status(const SharedRun&)>& visit);

}  // namespace superoffload::checkpoint

#endif  // SUPEROFFLOAD_SERVER_CHECKPOINT_BOX_H_
