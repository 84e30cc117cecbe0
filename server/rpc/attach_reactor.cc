#include "server/rpc/attach_reactor.h"

#include <vector>

#include "server/rpc/convert.h"

namespace superoffload::rpc {

AttachReactor::AttachReactor(optimizer::OptimizerTable* table, const checkpoint::Scheduler* scheduler,
                             const transport::Peer& peer, const v1::AttachOptimizerRequest& request)
    : table_(table) {
  if (absl::Status status = Attach(peer, request); !status.ok()) {
    Finish(ToGrpc(status));
    return;
  }
  response_.set_attachment_epoch(epoch_);
  *response_.mutable_optimizer() = ToProto(*optimizer_, scheduler->Get(optimizer_->id()), Details::kFull);
  response_.set_next_slot(optimizer_->engine().statistics().next_slot());
  StartWrite(&response_);
}

absl::Status AttachReactor::Attach(const transport::Peer& peer, const v1::AttachOptimizerRequest& request) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Get(peer, request.name());
  if (!optimizer.ok()) return optimizer.status();
  optimizer_ = *optimizer;
  absl::StatusOr<optimizer::Sync> sync = ToSync(request.sync());
  if (!sync.ok()) return sync.status();
  const std::vector<uint32_t> checksums(request.parameter_crc32().begin(), request.parameter_crc32().end());
  absl::StatusOr<uint64_t> epoch =
      table_->Attach(peer, optimizer_, *sync, checksums, [this](const absl::Status& reason) { OnEnd(reason); });
  if (!epoch.ok()) return epoch.status();
  epoch_ = *epoch;
  return absl::OkStatus();
}

void AttachReactor::OnEnd(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mu_);
    end_ = reason;
    if (writing_) return;
  }
  Finish(ToGrpc(reason));  // may destroy this
}

void AttachReactor::OnWriteDone(bool ok) {
  std::optional<absl::Status> end;
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    end = end_;
  }
  if (end) {
    Finish(ToGrpc(*end));
  } else if (!ok) {
    OnCancel();
  }
}

void AttachReactor::OnCancel() {
  if (epoch_ == 0) return;  // never attached
  optimizer_->RequestDetach(epoch_, absl::CancelledError("the trainer ended the attachment"));
}

}  // namespace superoffload::rpc
