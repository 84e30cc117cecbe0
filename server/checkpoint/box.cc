#include "server/checkpoint/box.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "server/checkpoint/safetensors.h"

namespace superoffload::checkpoint {
namespace {

// Where an element of the tensor lies in `box`.
uint64_t Place(const Box& box, const std::vector<uint64_t>& element) {
  uint64_t place = 0;
  for (size_t i = 0; i < element.size(); ++i) place = place * box.shape[i] + (element[i] - box.offset[i]);
  return place;
}

}  // namespace

uint64_t Box::Elements() const { return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>()); }

bool Fits(const Box& box) {
  if (!TensorBytes(sizeof(double), box.global_shape)) return false;  // no dtype is larger
  if (box.shape.size() != box.global_shape.size() || box.offset.size() != box.global_shape.size()) return false;
  for (size_t i = 0; i < box.shape.size(); ++i) {
    if (box.shape[i] > box.global_shape[i] || box.offset[i] > box.global_shape[i] - box.shape[i]) return false;
  }
  return true;
}

std::optional<Box> Intersection(const Box& a, const Box& b) {
  Box both{a.global_shape, {}, {}};
  for (size_t i = 0; i < a.shape.size(); ++i) {
    const uint64_t begin = std::max(a.offset[i], b.offset[i]);
    const uint64_t end = std::min(a.offset[i] + a.shape[i], b.offset[i] + b.shape[i]);
    if (begin >= end) return std::nullopt;
    both.offset.push_back(begin);
    both.shape.push_back(end - begin);
  }
  return both;
}

absl::Status ForEachSharedRun(const Box& from, const Box& at,
                              const std::function<absl::Status(const SharedRun&)>& visit) {
  const std::optional<Box> both = Intersection(from, at);
  if (!both) return absl::OkStatus();
  size_t inner = both->shape.size();  // dimensions from here on lie together in one run
  uint64_t count = 1;
  while (inner > 0) {
    --inner;
    count *= both->shape[inner];
    if (both->shape[inner] != from.shape[inner] || both->shape[inner] != at.shape[inner]) break;
  }
  std::vector<uint64_t> element = both->offset;
  for (;;) {
    if (absl::Status status = visit({Place(from, element), Place(at, element), count}); !status.ok()) return status;
    size_t dimension = inner;
    while (dimension > 0 && ++element[dimension - 1] == both->offset[dimension - 1] + both->shape[dimension - 1]) {
      element[dimension - 1] = both->offset[dimension - 1];
      --dimension;
    }
    if (dimension == 0) return absl::OkStatus();
  }
}

}  // namespace superoffload::checkpoint
