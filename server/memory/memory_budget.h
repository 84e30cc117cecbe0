// The daemon's memory budget: what all optimizers together may take, and who holds how much of it.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_MEMORY_BUDGET_H_
#define SUPEROFFLOAD_SERVER_MEMORY_MEMORY_BUDGET_H_

#include <sys/types.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace superoffload::memory {

// Bytes by what they are used for.
struct MemoryUse {
  uint64_t state_bytes = 0;       // master weights and moments
  uint64_t gradients_bytes = 0;   // all slots
  uint64_t parameters_bytes = 0;  // published parameters
  uint64_t metadata_bytes = 0;    // names, shapes, plans
  uint64_t lent_bytes = 0;        // to trainers, for uses of their own

  uint64_t total_bytes() const {
    return state_bytes + gradients_bytes + parameters_bytes + metadata_bytes + lent_bytes;
  }
};

class MemoryBudget;

// A share of a budget, given back on destruction. Must not outlive the budget.
class MemoryReservation {
 public:
  MemoryReservation() = default;
  MemoryReservation(MemoryReservation&& other) noexcept;
  MemoryReservation& operator=(MemoryReservation&& other) noexcept;
  ~MemoryReservation();

  const MemoryUse& use() const { return use_; }

  // Another share of the same user, as MemoryBudget::Reserve; of no budget, if this is of none.
  absl::StatusOr<MemoryReservation> ReserveMore(const std::string& purpose, const MemoryUse& use) const;

 private:
  friend class MemoryBudget;
  MemoryReservation(MemoryBudget* budget, uid_t uid, const MemoryUse& use) : budget_(budget), uid_(uid), use_(use) {}

  MemoryBudget* budget_ = nullptr;
  uid_t uid_ = 0;
  MemoryUse use_;
};

// Thread-safe.
class MemoryBudget {
 public:
  // `per_user_bytes` is what one user may take of it.
  explicit MemoryBudget(uint64_t limit_bytes, uint64_t per_user_bytes = std::numeric_limits<uint64_t>::max())
      : limit_bytes_(limit_bytes), per_user_bytes_(per_user_bytes) {}

  // RESOURCE_EXHAUSTED, with the numbers, when the rest of the budget or of the user's share is too small.
  absl::StatusOr<MemoryReservation> Reserve(const std::string& purpose, uid_t uid, const MemoryUse& use);

  // What Reserve would say now; reserves nothing.
  absl::Status Check(const std::string& purpose, uid_t uid, const MemoryUse& use) const;

  MemoryUse used() const;

 private:
  friend class MemoryReservation;
  absl::Status CheckLocked(const std::string& purpose, uid_t uid, const MemoryUse& use) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Release(uid_t uid, const MemoryUse& use);

  const uint64_t limit_bytes_;
  const uint64_t per_user_bytes_;
  mutable absl::Mutex mu_;
  MemoryUse used_ ABSL_GUARDED_BY(mu_);
  std::map<uid_t, uint64_t> used_by_user_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_MEMORY_BUDGET_H_
