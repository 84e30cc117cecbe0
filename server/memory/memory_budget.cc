#include "server/memory/memory_budget.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::memory {

MemoryReservation::MemoryReservation(MemoryReservation&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), uid_(other.uid_), use_(other.use_) {}

MemoryReservation& MemoryReservation::operator=(MemoryReservation&& other) noexcept {
  if (this != &other) {
    if (budget_ != nullptr) budget_->Release(uid_, use_);
    budget_ = std::exchange(other.budget_, nullptr);
    uid_ = other.uid_;
    use_ = other.use_;
  }
  return *this;
}

MemoryReservation::~MemoryReservation() {
  if (budget_ != nullptr) budget_->Release(uid_, use_);
}

absl::StatusOr<MemoryReservation> MemoryBudget::Reserve(const std::string& purpose, uid_t uid, const MemoryUse& use) {
  absl::MutexLock lock(&mu_);
  const uint64_t free_bytes = limit_bytes_ - used_.total_bytes();
  if (use.total_bytes() > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        purpose, " needs ", use.total_bytes(), " bytes but only ", free_bytes, " of the daemon's budget of ",
        limit_bytes_, " bytes are free; delete an optimizer or raise memory_budget_bytes"));
  }
  uint64_t& by_user = used_by_user_[uid];
  if (use.total_bytes() > per_user_bytes_ - by_user) {
    return absl::ResourceExhaustedError(absl::StrCat(
        purpose, " needs ", use.total_bytes(), " bytes but uid ", uid, " has only ", per_user_bytes_ - by_user,
        " of its share of ", per_user_bytes_, " bytes free; delete an optimizer or raise per_user_memory_bytes"));
  }
  by_user += use.total_bytes();
  used_.state_bytes += use.state_bytes;
  used_.gradients_bytes += use.gradients_bytes;
  used_.parameters_bytes += use.parameters_bytes;
  used_.metadata_bytes += use.metadata_bytes;
  return MemoryReservation(this, uid, use);
}

MemoryUse MemoryBudget::used() const {
  absl::MutexLock lock(&mu_);
  return used_;
}

void MemoryBudget::Release(uid_t uid, const MemoryUse& use) {
  absl::MutexLock lock(&mu_);
  used_by_user_[uid] -= use.total_bytes();
  used_.state_bytes -= use.state_bytes;
  used_.gradients_bytes -= use.gradients_bytes;
  used_.parameters_bytes -= use.parameters_bytes;
  used_.metadata_bytes -= use.metadata_bytes;
}

}  // namespace superoffload::memory
