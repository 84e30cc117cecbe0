#include "server/memory/memory_budget.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

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

absl::StatusOr<MemoryReservation> MemoryReservation::ReserveMore(const std::string& purpose,
                                                                 const MemoryUse& use) const {
  return budget_ == nullptr ? MemoryReservation() : budget_->Reserve(purpose, uid_, use);
}

absl::Status MemoryBudget::CheckLocked(const std::string& purpose, uid_t uid, const MemoryUse& use) const {
  SUPEROFFLOAD_CHECK_LE(used_.total_bytes(), limit_bytes_);
  const uint64_t free_bytes = limit_bytes_ - used_.total_bytes();
  if (use.total_bytes() > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        purpose, " needs ", use.total_bytes(), " bytes but only ", free_bytes, " of the daemon's budget of ",
        limit_bytes_, " bytes are free; delete an optimizer or raise memory_budget_bytes"));
  }
  const auto user = used_by_user_.find(uid);
  const uint64_t by_user = user == used_by_user_.end() ? 0 : user->second;
  SUPEROFFLOAD_CHECK_LE(by_user, per_user_bytes_, "uid ", uid);
  if (use.total_bytes() > per_user_bytes_ - by_user) {
    return absl::ResourceExhaustedError(absl::StrCat(
        purpose, " needs ", use.total_bytes(), " bytes but uid ", uid, " has only ", per_user_bytes_ - by_user,
        " of its share of ", per_user_bytes_, " bytes free; delete an optimizer or raise per_user_memory_bytes"));
  }
  return absl::OkStatus();
}

absl::Status MemoryBudget::Check(const std::string& purpose, uid_t uid, const MemoryUse& use) const {
  absl::MutexLock lock(&mu_);
  return CheckLocked(purpose, uid, use);
}

absl::StatusOr<MemoryReservation> MemoryBudget::Reserve(const std::string& purpose, uid_t uid, const MemoryUse& use) {
  absl::MutexLock lock(&mu_);
  if (absl::Status status = CheckLocked(purpose, uid, use); !status.ok()) return status;
  used_by_user_[uid] += use.total_bytes();
  used_.state_bytes += use.state_bytes;
  used_.gradients_bytes += use.gradients_bytes;
  used_.parameters_bytes += use.parameters_bytes;
  used_.metadata_bytes += use.metadata_bytes;
  used_.lent_bytes += use.lent_bytes;
  return MemoryReservation(this, uid, use);
}

MemoryUse MemoryBudget::used() const {
  absl::MutexLock lock(&mu_);
  return used_;
}

void MemoryBudget::Release(uid_t uid, const MemoryUse& use) {
  const auto give_back = [uid](uint64_t bytes, uint64_t& used) {
    SUPEROFFLOAD_CHECK_LE(bytes, used, "given back by uid ", uid);
    used -= bytes;
  };
  absl::MutexLock lock(&mu_);
  give_back(use.total_bytes(), used_by_user_[uid]);
  give_back(use.state_bytes, used_.state_bytes);
  give_back(use.gradients_bytes, used_.gradients_bytes);
  give_back(use.parameters_bytes, used_.parameters_bytes);
  give_back(use.metadata_bytes, used_.metadata_bytes);
  give_back(use.lent_bytes, used_.lent_bytes);
}

}  // namespace superoffload::memory
