// Which bucket's parameters are copied to the GPU next.
//
// Parameters change when a step commits and at no other time: what is published before the verdict stays in host
// memory, and a step that is skipped has nothing copied. Of several buckets the one that the next forward pass reads
// first goes first, which is the last one: bucket 0 holds the last layer.
#ifndef SUPEROFFLOAD_KERNELS_CUDA_UPLOAD_ORDER_H_
#define SUPEROFFLOAD_KERNELS_CUDA_UPLOAD_ORDER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <vector>

namespace superoffload::kernels {

// Not thread-safe. What is told of a step before the latest is of no consequence.
class UploadOrder {
 public:
  // The bucket's parameters are in host memory. `speculative`: the verdict tells whether they stand.
  void OnPublished(uint64_t step, uint32_t bucket, bool speculative) {
    if (!Follow(step)) return;
    if (!verdict_) {
      if (speculative) speculated_.push_back(bucket);
    } else if (verdict_->commits && (!speculative || verdict_->speculation_stands)) {
      due_.insert(bucket);
    }
  }

  void OnVerdict(uint64_t step, bool commits, bool speculation_stands) {
    if (!Follow(step)) return;
    verdict_ = {commits, speculation_stands};
    if (commits && speculation_stands) due_.insert(speculated_.begin(), speculated_.end());
  }

  bool due() const { return !due_.empty(); }
  uint64_t step() const { return step_; }

  // None is due: nothing.
  std::optional<uint32_t> Take() {
    if (due_.empty()) return std::nullopt;
    const uint32_t bucket = *due_.begin();
    due_.erase(due_.begin());
    return bucket;
  }

 private:
  struct Verdict {
    bool commits, speculation_stands;
  };

  // Whether this is of the latest step.
  bool Follow(uint64_t step) {
    if (step > step_) {
      step_ = step;
      verdict_.reset();
      speculated_.clear();
      due_.clear();
    }
    return step == step_;
  }

  uint64_t step_ = 0;
  std::optional<Verdict> verdict_;
  std::vector<uint32_t> speculated_;
  std::set<uint32_t, std::greater<>> due_;
};

}  // namespace superoffload::kernels

#endif  // SUPEROFFLOAD_KERNELS_CUDA_UPLOAD_ORDER_H_
