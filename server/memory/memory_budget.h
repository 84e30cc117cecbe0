// The daemon's memory budget: what all optimizers together may take, and who holds how much of it.
#ifndef SUPEROFFLOAD_SERVER_MEMORY_MEMORY_BUDGET_H_
#define SUPEROFFLOAD_SERVER_MEMORY_MEMORY_BUDGET_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace superoffload::memory {

// Bytes by what they are used for.
struct MemoryUse {
  uint64_t state_bytes = 0;       // master weights and moments
  uint64_t gradients_bytes = 0;   // both slots, one of them pending
  uint64_t parameters_bytes = 0;  // published parameters

  uint64_t total_bytes() const { return state_bytes + gradients_bytes + parameters_bytes; }
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

 private:
  friend class MemoryBudget;
  MemoryReservation(MemoryBudget* budget, const MemoryUse& use) : budget_(budget), use_(use) {}

  MemoryBudget* budget_ = nullptr;
  MemoryUse use_;
};

// Thread-safe.
class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // RESOURCE_EXHAUSTED, with the numbers, when the rest of the budget is too small.
  absl::StatusOr<MemoryReservation> Reserve(const std::string& purpose, const MemoryUse& use);

  uint64_t limit_bytes() const { return limit_bytes_; }
  MemoryUse used() const;

 private:
  friend class MemoryReservation;
  void Release(const MemoryUse& use);

  const uint64_t limit_bytes_;
  mutable absl::Mutex mu_;
  MemoryUse used_ ABSL_GUARDED_BY(mu_);
};

}  // namespace superoffload::memory

#endif  // SUPEROFFLOAD_SERVER_MEMORY_MEMORY_BUDGET_H_
