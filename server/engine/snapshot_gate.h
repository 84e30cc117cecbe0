// Which buckets must keep their state until it was saved. Plain bookkeeping under the engine's lock.
//
// A snapshot is of a settled moment between steps. The first step after it only reads state; from the second on a pass
// that would write a bucket waits until that bucket is saved, and such buckets are saved first. So a checkpoint has the
// length of a step for free, and needs no copy of the state.
#ifndef SUPEROFFLOAD_SERVER_ENGINE_SNAPSHOT_GATE_H_
#define SUPEROFFLOAD_SERVER_ENGINE_SNAPSHOT_GATE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/base/check.h"

namespace superoffload::engine {

class SnapshotGate {
 public:
  // Every bucket is to be saved.
  void Close(uint32_t buckets) {
    SUPEROFFLOAD_CHECK(!closed_, "there is one snapshot at a time");
    closed_ = true;
    held_.assign(buckets, true);
    unclaimed_.resize(buckets);
    std::iota(unclaimed_.begin(), unclaimed_.end(), 0);
  }
  bool closed() const { return closed_; }

  // Whether `bucket` is not saved yet.
  bool Holds(uint32_t bucket) const {
    if (!closed_) return false;
    SUPEROFFLOAD_CHECK_LT(bucket, held_.size());
    return held_[bucket];
  }

  // A pass that would write `bucket` waits for it from now on.
  void Await(uint32_t bucket) {
    SUPEROFFLOAD_CHECK(Holds(bucket), "a pass waits for bucket ", bucket, ", which nothing holds");
    awaited_.push_back(bucket);
    if (const auto found = std::find(unclaimed_.begin(), unclaimed_.end(), bucket); found != unclaimed_.end()) {
      unclaimed_.erase(found);
      unclaimed_.push_front(bucket);
    }
  }
  bool anybody_waits() const { return !awaited_.empty(); }

  // The steps that waited are over.
  void ForgetAwaited() { awaited_.clear(); }

  // The bucket to save next, each once; none when all are saved or being saved.
  std::optional<uint32_t> Claim() {
    if (unclaimed_.empty()) return std::nullopt;
    const uint32_t bucket = unclaimed_.front();
    unclaimed_.pop_front();
    return bucket;
  }

  // Returns whether a pass waited for it.
  bool Saved(uint32_t bucket) {
    SUPEROFFLOAD_CHECK(Holds(bucket), "bucket ", bucket, " is saved twice or in no snapshot");
    SUPEROFFLOAD_CHECK(std::find(unclaimed_.begin(), unclaimed_.end(), bucket) == unclaimed_.end(), "bucket ", bucket,
                       " is saved but nobody has claimed it");
    held_[bucket] = false;
    return std::erase(awaited_, bucket) > 0;
  }

  // Holds nothing any more; returns the buckets for which a pass waited.
  std::vector<uint32_t> Open() {
    SUPEROFFLOAD_CHECK(closed_, "a snapshot ends twice");
    closed_ = false;
    unclaimed_.clear();
    return std::exchange(awaited_, {});
  }

 private:
  bool closed_ = false;
  std::vector<bool> held_;
  std::deque<uint32_t> unclaimed_;
  std::vector<uint32_t> awaited_;
};

}  // namespace superoffload::engine

#endif  // SUPEROFFLOAD_SERVER_ENGINE_SNAPSHOT_GATE_H_
