#include "server/memory/memory_budget.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::memory {

MemoryReservation::MemoryReservation(MemoryReservation&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), use_(other.use_) {}

MemoryReservation& MemoryReservation::operator=(MemoryReservation&& other) noexcept {
  if (this != &other) {
    if (budget_ != nullptr) budget_->Release(use_);
    budget_ = std::exchange(other.budget_, nullptr);
    use_ = other.use_;
  }
  return *this;
}

MemoryReservation::~MemoryReservation() {
  if (budget_ != nullptr) budget_->Release(use_);
}

absl::StatusOr<MemoryReservation> MemoryBudget::Reserve(const std::string& purpose, const MemoryUse& use) {
  absl::MutexLock lock(&mu_);
  const uint64_t free_bytes = limit_bytes_ - used_.total_bytes();
  if (use.total_bytes() > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        purpose, " needs ", use.total_bytes(), " bytes but only ", free_bytes, " of the daemon's budget of ",
        limit_bytes_, " bytes are free; delete an optimizer or raise memory_budget_bytes"));
  }
  used_.state_bytes += use.state_bytes;
  used_.gradients_bytes += use.gradients_bytes;
  used_.parameters_bytes += use.parameters_bytes;
  return MemoryReservation(this, use);
}

MemoryUse MemoryBudget::used() const {
  absl::MutexLock lock(&mu_);
  return used_;
}

void MemoryBudget::Release(const MemoryUse& use) {
  absl::MutexLock lock(&mu_);
  used_.state_bytes -= use.state_bytes;
  used_.gradients_bytes -= use.gradients_bytes;
  used_.parameters_bytes -= use.parameters_bytes;
}

}  // namespace superoffload::memory
