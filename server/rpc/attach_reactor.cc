#include "server/rpc/attach_reactor.h"

#include <utility>
#include <vector>

#include "server/rpc/call_thread.h"
#include "server/rpc/from_proto.h"
#include "server/rpc/to_proto.h"

namespace superoffload::rpc {

AttachReactor::AttachReactor(optimizer::OptimizerTable* table, const checkpoint::Scheduler* scheduler,
                             const transport::Peer& peer)
    : table_(table), scheduler_(scheduler), peer_(peer), request_(std::in_place, table->budget(), peer.uid) {
  StartRead(&page_);
}

void AttachReactor::OnReadDone(bool ok) {
  if (!ok) return Finish(EndedEarly());
  if (absl::Status status = request_->Add(page_); !status.ok()) return Finish(ToGrpc(status));
  if (!request_->complete()) return StartRead(&page_);
  if (absl::Status started = StartCallThread([this] { Answer(); }); !started.ok()) Finish(ToGrpc(started));
}

void AttachReactor::Answer() {
  const absl::StatusOr<bool> cancelled = Attach(request_->whole());
  if (!cancelled.ok()) return Finish(ToGrpc(cancelled.status()));
  request_.reset();
  if (*cancelled) OnCancel();  // it met no attachment; once more does no harm
  StartWrite(&response_);      // until it is done nobody finishes the call
}

absl::StatusOr<bool> AttachReactor::Attach(const v1::AttachOptimizerRequest& request) {
  absl::StatusOr<optimizer::OptimizerPtr> optimizer = table_->Get(peer_, request.name());
  if (!optimizer.ok()) return optimizer.status();
  absl::StatusOr<optimizer::Sync> sync = ToSync(request.sync());
  if (!sync.ok()) return sync.status();
  const std::vector<uint32_t> checksums(request.parameter_crc32().begin(), request.parameter_crc32().end());
  absl::StatusOr<uint64_t> epoch =
      table_->Attach(peer_, *optimizer, *sync, checksums, [this](const absl::Status& reason) { OnEnd(reason); });
  if (!epoch.ok()) return epoch.status();
  response_.set_attachment_epoch(*epoch);
  *response_.mutable_optimizer() = ToProto(**optimizer, scheduler_->Get((*optimizer)->id()));
  response_.set_next_slot((*optimizer)->engine().statistics().next_slot());
  absl::MutexLock lock(&mu_);
  optimizer_ = *std::move(optimizer);
  epoch_ = *epoch;
  return cancelled_;
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
  optimizer::OptimizerPtr optimizer;
  uint64_t epoch;
  {
    absl::MutexLock lock(&mu_);
    cancelled_ = true;
    optimizer = optimizer_;
    epoch = epoch_;
  }
  if (epoch == 0) return;  // not attached, or not yet
  optimizer->RequestDetach(epoch, absl::CancelledError("the trainer ended the attachment"));
}

}  // namespace superoffload::rpc
