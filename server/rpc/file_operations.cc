#include "server/rpc/file_operations.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace superoffload::rpc {

absl::StatusOr<std::unique_ptr<FileOperations::Operation>> FileOperations::Begin(uid_t uid) {
  absl::MutexLock lock(&mu_);
  size_t& of_user = by_user_[uid];
  if (of_user >= kPerUser || total_ >= kTotal) {
    return absl::ResourceExhaustedError(
        absl::StrCat("uid ", uid, " saves or restores ", of_user, " checkpoints at this moment, and all users ", total_,
                     "; wait for the end of one (at most ", kPerUser, " and ", kTotal, ")"));
  }
  ++of_user;
  ++total_;
  return std::make_unique<Operation>(this, uid);
}

FileOperations::Operation::~Operation() {
  absl::MutexLock lock(&all_->mu_);
  --all_->total_;
  if (--all_->by_user_[uid_] == 0) all_->by_user_.erase(uid_);
}

}  // namespace superoffload::rpc
