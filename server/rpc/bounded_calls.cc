#include "server/rpc/bounded_calls.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace superoffload::rpc {

absl::StatusOr<std::unique_ptr<BoundedCalls::Place>> BoundedCalls::Begin(uid_t uid) {
  absl::MutexLock lock(&mu_);
  size_t& of_user = by_user_[uid];
  if (of_user >= most_per_user_ || total_ >= most_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("uid ", uid, " has ", of_user, " ", what_, " under way, and all users have ", total_,
                     "; wait for the end of one (at most ", most_per_user_, " and ", most_, ")"));
  }
  ++of_user;
  ++total_;
  return std::make_unique<Place>(this, uid);
}

BoundedCalls::Place::~Place() {
  absl::MutexLock lock(&all_->mu_);
  const auto of_user = all_->by_user_.find(uid_);
  SUPEROFFLOAD_CHECK(of_user != all_->by_user_.end() && of_user->second > 0, "uid ", uid_, " ends one that it lacks");
  SUPEROFFLOAD_CHECK_LE(of_user->second, all_->total_, "of uid ", uid_, " and of all");
  --all_->total_;
  if (--of_user->second == 0) all_->by_user_.erase(of_user);
}

}  // namespace superoffload::rpc
