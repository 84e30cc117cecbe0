// Which device slots are free. Taking one waits while all are in flight: the trainer cannot run ahead
// further.
#ifndef SUPEROFFLOAD_CLIENT_SRC_GPU_DEVICE_SLOT_POOL_H_
#define SUPEROFFLOAD_CLIENT_SRC_GPU_DEVICE_SLOT_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "client/src/status.h"
#include "kernels/base/check.h"

namespace superoffload::client {

// Thread-safe.
class DeviceSlotPool {
 public:
  explicit DeviceSlotPool(uint32_t slots) : taken_(slots, false) {
    for (uint32_t slot = slots; slot > 0; --slot) free_.push_back(slot - 1);
  }

  // An error when no slot will become free any more.
  Status Take(uint32_t* slot) {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [this] { return !free_.empty() || !failure_.ok(); });
    if (!failure_.ok()) return failure_;
    *slot = free_.back();
    free_.pop_back();
    SUPEROFFLOAD_CHECK(!taken_[*slot], "device slot ", *slot);
    taken_[*slot] = true;
    return {};
  }

  // False: nobody had taken it, and nothing happens.
  bool Free(uint32_t slot) {
    {
      std::lock_guard lock(mu_);
      if (slot >= taken_.size() || !taken_[slot]) return false;
      taken_[slot] = false;
      free_.push_back(slot);
      SUPEROFFLOAD_CHECK_LE(free_.size(), taken_.size());
    }
    changed_.notify_all();
    return true;
  }

  // The first failure counts.
  void Fail(const Status& status) {
    {
      std::lock_guard lock(mu_);
      if (failure_.ok()) failure_ = status;
    }
    changed_.notify_all();
  }

  Status failure() const {
    std::lock_guard lock(mu_);
    return failure_;
  }

 private:
  mutable std::mutex mu_;
  std::condition_variable changed_;
  std::vector<uint32_t> free_;
  std::vector<bool> taken_;
  Status failure_;
};

}  // namespace superoffload::client

#endif  // SUPEROFFLOAD_CLIENT_SRC_GPU_DEVICE_SLOT_POOL_H_
