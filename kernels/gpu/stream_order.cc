#include "kernels/gpu/stream_order.h"

namespace superoffload::kernels {

void StreamOrder::Use(uint32_t unit) {
  if (present_ == unit) return;
  if (present_) followed_[{before_, *present_}] = unit;
  before_ = present_.value_or(unit);
  present_ = unit;
}

std::vector<uint32_t> StreamOrder::Expect(size_t uses) const {
  std::vector<uint32_t> expected;
  if (!present_ || units_ < 2) return expected;
  uint32_t before = before_, unit = *present_;
  while (expected.size() < uses) {
    const uint32_t next = After(before, unit);
    expected.push_back(next);
    before = unit;
    unit = next;
  }
  return expected;
}

uint32_t StreamOrder::After(uint32_t before, uint32_t unit) const {
  if (const auto found = followed_.find({before, unit}); found != followed_.end()) return found->second;
  const bool up = before <= unit ? unit + 1 < units_ : unit == 0;
  return up ? unit + 1 : unit - 1;
}

}  // namespace superoffload::kernels
