#include "kernels/gpu/upload_order.h"

#include <iterator>

#include "kernels/base/check.h"

namespace superoffload::kernels {

void UploadOrder::SetCopied(uint32_t bucket, bool copied) {
  copied_[bucket] = copied;
  comes_[bucket] = false;
  if (!copied) Remove(bucket);
}

bool UploadOrder::Fetch(uint32_t bucket) {
  if (comes_[bucket]) return false;
  Add(bucket);
  return comes_[bucket];
}

void UploadOrder::OnPublished(uint64_t step, uint32_t bucket, bool speculative) {
  if (!Follow(step)) return;
  if (!verdict_) {
    if (speculative) speculated_.push_back(bucket);
  } else if (verdict_->commits && (!speculative || verdict_->speculation_stands)) {
    Add(bucket);
  }
}

void UploadOrder::OnVerdict(uint64_t step, bool commits, bool speculation_stands) {
  if (!Follow(step)) return;
  verdict_ = {commits, speculation_stands};
  if (!commits || !speculation_stands) return;
  for (const uint32_t bucket : speculated_) Add(bucket);
}

bool UploadOrder::IsDue(uint32_t bucket) const {
  for (const auto& [step, buckets] : due_) {
    if (buckets.contains(bucket)) return true;
  }
  return false;
}

std::optional<UploadOrder::Upload> UploadOrder::Take(uint32_t bucket) {
  for (auto of_step = due_.begin(); of_step != due_.end(); ++of_step) {
    if (of_step->second.contains(bucket)) return Take(of_step, bucket);
  }
  return std::nullopt;
}

std::optional<UploadOrder::Upload> UploadOrder::TakeAny() {
  if (due_.empty()) return std::nullopt;
  return Take(due_.begin(), *due_.begin()->second.begin());
}

void UploadOrder::OnLanded() {
  SUPEROFFLOAD_CHECK_LT(0u, in_flight_);
  --in_flight_;
}

bool UploadOrder::Follow(uint64_t step) {
  if (step > step_) {
    step_ = step;
    verdict_.reset();
    speculated_.clear();
  }
  return step == step_;
}

void UploadOrder::Add(uint32_t bucket) {
  if (!copied_[bucket]) return;
  Remove(bucket);
  due_[step_].insert(bucket);
  comes_[bucket] = true;
}

void UploadOrder::Remove(uint32_t bucket) {
  for (auto of_step = due_.begin(); of_step != due_.end();) {
    of_step->second.erase(bucket);
    of_step = of_step->second.empty() ? due_.erase(of_step) : std::next(of_step);
  }
}

std::optional<UploadOrder::Upload> UploadOrder::Take(std::map<uint64_t, Buckets>::iterator of_step, uint32_t bucket) {
  const Upload upload{of_step->first, bucket};
  of_step->second.erase(bucket);
  if (of_step->second.empty()) due_.erase(of_step);
  ++in_flight_;
  return upload;
}

}  // namespace superoffload::kernels
