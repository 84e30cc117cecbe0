#include "client/src/gpu/slot_waits.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace superoffload::client {
namespace {

constexpr uint32_t kNoBucket = std::numeric_limits<uint32_t>::max();

}  // namespace

SlotWaits::SlotWaits(std::vector<bool> one_slot)
    : one_slot_(std::move(one_slot)), any_(std::ranges::count(one_slot_, true) > 0), slots_(one_slot_.size()) {}

Status SlotWaits::Submit(Go go) { return any_ ? SubmitBehind({kNoBucket, std::move(go)}) : go(); }

Status SlotWaits::SubmitGradient(uint32_t bucket, Go go) {
  return any_ ? SubmitBehind({one_slot_[bucket] ? bucket : kNoBucket, std::move(go)}) : go();
}

Status SlotWaits::SubmitBehind(Waiting waiting) {
  const std::lock_guard lock(mu_);
  waiting_.push_back(std::move(waiting));
  return waiting_.size() == 1 ? Drain() : Status{};
}

void SlotWaits::Stop() {
  const std::lock_guard lock(mu_);
  stopped_ = true;
}

Status SlotWaits::Take(const superoffload_ring_entry& entry) {
  const std::lock_guard lock(mu_);
  if (entry.opcode == SUPEROFFLOAD_COMPLETE_VERDICT) {
    const bool commits = entry.index == SUPEROFFLOAD_VERDICT_COMMIT || entry.index == SUPEROFFLOAD_VERDICT_CLIP;
    std::ranges::replace(slots_, Slot::kOfOpenStep, commits ? Slot::kPending : Slot::kFree);
  } else if (entry.opcode == SUPEROFFLOAD_COMPLETE_SLOT_FREE && entry.index < slots_.size() &&
             slots_[entry.index] == Slot::kPending) {
    slots_[entry.index] = Slot::kFree;
  }
  return Drain();
}

Status SlotWaits::Drain() {
  while (!waiting_.empty() && !stopped_) {
    const uint32_t bucket = waiting_.front().bucket;
    if (bucket != kNoBucket) {
      if (slots_[bucket] != Slot::kFree) break;
      slots_[bucket] = Slot::kOfOpenStep;
    }
    const Go go = std::move(waiting_.front().go);
    waiting_.pop_front();
    if (Status status = go(); !status.ok()) return status;
  }
  return {};
}

}  // namespace superoffload::client
